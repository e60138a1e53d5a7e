"""One call of `generate`: options, loop, results."""
