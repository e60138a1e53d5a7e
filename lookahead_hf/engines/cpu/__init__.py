"""Decoder layers by kernels that numba compiles, on a CPU."""
