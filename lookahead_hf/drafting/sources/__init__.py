"""Sources that propose tokens, one per file."""
