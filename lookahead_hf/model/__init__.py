"""Facts about a model: its positions, virtual tokens, compiled forwards, numerics."""
