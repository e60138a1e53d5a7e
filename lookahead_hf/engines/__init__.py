"""Engines, which run steps in place of the model's own code."""
