"""Facts about a model: its positions, numerics."""
