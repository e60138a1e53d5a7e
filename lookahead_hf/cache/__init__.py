"""The cache: taken over from transformers, one length per row, handed back in plain's columns."""
