"""Verification: which draft tokens stand, decided as plain `generate` would decide."""
