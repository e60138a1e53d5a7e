"""Facts about a model: its positions, compiled forwards, numerics."""
