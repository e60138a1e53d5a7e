"""How much is drafted, and by which sources, from measured costs and learned rates."""
