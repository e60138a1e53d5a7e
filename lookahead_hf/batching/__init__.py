"""A door: `lookahead_hf.queue` under its first name."""
