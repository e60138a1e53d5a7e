"""Matches of a context, and what may follow them: keys, classes of match lengths, buckets."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

BORDER = -1
"""Separates two texts in an index: no match contains it, and no text continues into it."""

NUM_KEYS = 4
"""Key k is the last `2**k` tokens; comparing tokens finds the match lengths in between."""

VISITS = (32, 16, 8, 4)
"""Occurrences of each key that a look-up visits, newest first."""

LEVELS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32)
"""Shortest match length of each class of match lengths."""

NUM_SHARES = 4
NUM_TOTALS = 3
NUM_BUCKETS = len(LEVELS) * NUM_SHARES * NUM_TOTALS
LONGEST_MATCH = LEVELS[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Continuations:
    """A tree of tokens that may follow a text, best paths first, parents before children.

    The longest matches before a token decide its bucket: the class of their length, the number of
    matches of that class or a higher one, and the share of them that the token followed.
    """

    score: np.ndarray  # [nodes] float32, product of the buckets' rates along the path
    token_ids: np.ndarray  # [nodes] int64
    parents: np.ndarray  # [nodes] int32, -1 for tokens that follow the text directly
    depth: np.ndarray  # [nodes] int32, 1 for tokens that follow the text directly
    bucket: np.ndarray  # [nodes] int32


def level_of(match_len: int) -> int:
    """Return the class of a match length: its index in `LEVELS`."""
    return bisect_right(LEVELS, match_len) - 1


def check_limits(min_ngram: int, max_ngram: int) -> None:
    """Raise ValueError if match lengths are not ints with `1 <= min_ngram <= max_ngram <= 32`."""
    # A bool is an int to Python; comparing an array with a number yields no truth value.
    are_ints = {type(min_ngram), type(max_ngram)} == {int}
    if not are_ints or not 1 <= min_ngram <= max_ngram <= LONGEST_MATCH:
        raise ValueError(
            f"min_ngram={min_ngram!r} and max_ngram={max_ngram!r} were given: choose integers with "
            f"1 <= min_ngram <= max_ngram <= {LONGEST_MATCH}"
        )
