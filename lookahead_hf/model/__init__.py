"""Knowledge of a model: which positions it has, virtual tokens, compiled forwards."""
