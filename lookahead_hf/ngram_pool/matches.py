"""Matches of a context, and what may follow them: keys, classes of match lengths, buckets."""

from __future__ import annotations

from bisect import bisect_right

BORDER = -1  # Separates two texts in an index: no match contains it, and no text continues into it
NUM_KEYS = 4  # Key k is the last `2**k` tokens; comparing tokens finds the match lengths in between
VISITS = (32, 16, 8, 4)  # Occurrences of each key that a look-up visits, newest first
LEVELS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32)  # Shortest match length of each class of match lengths

NUM_SHARES = 4
NUM_TOTALS = 3
NUM_BUCKETS = len(LEVELS) * NUM_SHARES * NUM_TOTALS
LONGEST_MATCH = LEVELS[-1]


def level_of(match_len: int) -> int:
    """Return the class of a match length: its index in `LEVELS`."""
    return bisect_right(LEVELS, match_len) - 1
