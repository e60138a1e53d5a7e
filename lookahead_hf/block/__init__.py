"""Describes one forward: the tokens of its block, their positions, and what each of them sees."""
