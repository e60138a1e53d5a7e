"""Verification: which draft tokens are accepted, decided as plain `generate` chooses tokens."""
