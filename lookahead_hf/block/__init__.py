"""The description of one forward, and what reads it."""
