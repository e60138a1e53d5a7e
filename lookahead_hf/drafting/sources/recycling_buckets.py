"""Buckets of recycled tokens: class of rank and class of probability, per kind of memory."""

from __future__ import annotations

RANK_EDGES = (1, 2, 3, 5, 8)
PROB_EDGES = (0.005, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
NUM_PROBS = len(PROB_EDGES) + 1
SINGLE_START = (len(RANK_EDGES) + 1) * NUM_PROBS
NEXT_START = 2 * SINGLE_START
NUM_BUCKETS = 3 * SINGLE_START
"""First come the buckets of tokens remembered under two tokens, then (from `SINGLE_START`) those of
tokens remembered under one token, then (from `NEXT_START`) those of the last logits' other
candidates."""

NO_BUCKET = -1

MIN_REACH = 1e-4
"""Least probability of a node that is worth a place in an otherwise empty tree."""
