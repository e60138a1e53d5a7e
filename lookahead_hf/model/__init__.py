"""A model: facts, what is kept of it between calls, a self test, internals of transformers."""
