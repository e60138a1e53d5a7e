"""Buckets of recycled tokens: by key, class of rank, and class of probability."""

from __future__ import annotations

RANK_EDGES = (1, 2, 3, 5, 8)
PROB_EDGES = (0.005, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
NUM_PROBS = len(PROB_EDGES) + 1
SINGLE_START = (len(RANK_EDGES) + 1) * NUM_PROBS
NEXT_START = 2 * SINGLE_START
NUM_BUCKETS = 3 * SINGLE_START
"""The buckets of tokens remembered under two tokens come first.

Then come those under one (from `SINGLE_START`) and those of the last logits (from `NEXT_START`).
"""

NO_BUCKET = -1

MIN_REACH = 1e-4
"""Least probability of a node worth verifying."""
