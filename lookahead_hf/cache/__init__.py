"""The cache: moved from transformers into slots, one length per row, and handed back."""
