"""One call of `generate`: options, loop, outputs."""
