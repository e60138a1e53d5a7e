"""Heads of the target that draft: they predict further tokens from its last hidden states."""
