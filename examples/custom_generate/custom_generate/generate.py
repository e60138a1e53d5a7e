"""What transformers runs in the place of `generate` for this repository."""

from lookahead_hf.hook import custom_generate as generate

__all__ = ["generate"]
