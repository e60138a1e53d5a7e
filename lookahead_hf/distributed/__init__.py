"""Processes that run a model together: how it lies over them, and what they tell each other."""
