"""Compiled kernels for a CPU: linear layers, decoder layers, and the choice of tokens."""
