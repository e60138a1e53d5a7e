"""Grammars that constrain a text: one adapter for each library that compiles them."""
