"""Continuous batching: requests come, are decoded together, and leave."""
