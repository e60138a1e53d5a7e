"""Drafting: what proposes the next tokens, how much of it is worth verifying."""
