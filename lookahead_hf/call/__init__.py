"""Data of one call of `generate`: settings, outputs, streams."""
