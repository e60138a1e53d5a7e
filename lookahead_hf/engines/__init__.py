"""Engines: what runs a step in place of the model's own code."""
