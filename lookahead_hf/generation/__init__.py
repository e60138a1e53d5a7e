"""The course of a call of `generate`: arguments, loop, results."""
