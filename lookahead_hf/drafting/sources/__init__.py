"""What proposes tokens, one source per file."""
