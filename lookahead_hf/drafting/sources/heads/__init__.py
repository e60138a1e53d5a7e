"""Heads that draft from the target's last hidden states."""
