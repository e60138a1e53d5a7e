"""One call of `generate`: its arguments, its outputs, and how tokens are emitted."""
