"""Checks of what is supported, and the self test of models of unknown type."""
