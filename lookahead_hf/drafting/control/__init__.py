"""Decisions on how much is drafted, by which sources, from measured costs and learned rates."""
