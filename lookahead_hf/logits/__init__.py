"""Logits processors: what plain `generate` does to a row's logits before it chooses a token."""
