"""The runner on a CUDA device: steps that stay there, captured as CUDA graphs."""
