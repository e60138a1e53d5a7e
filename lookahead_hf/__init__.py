"""Training-free speculative decoding for Hugging Face transformers: the same text, faster."""
