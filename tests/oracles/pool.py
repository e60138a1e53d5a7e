"""The pool in plain Python: what the compiled one must find."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lookahead_hf.ngram_pool.matches import (
    BORDER,
    LONGEST_MATCH,
    NUM_KEYS,
    VISITS,
    Continuations,
    level_of,
)
from tests.oracles.suffix_index import bucket_of


class Occurrence(NamedTuple):
    """Where a path was found: the place of the next token, and the match length before it."""

    place: int
    match_len: int


class NgramPool:
    """Finds what `ngram_pool.NgramPool` finds while none of its buckets overflows."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._log: list[int] = []

    def __len__(self) -> int:
        return sum(token > BORDER for token in self._log)

    def add(self, token_ids: Sequence[int]) -> None:
        self._log = [*self._log, *token_ids, BORDER][-self._max_tokens :]

    def grow(
        self,
        context: Sequence[int],
        rates: Sequence[float],
        max_nodes: int,
        *,
        min_ngram: int = 1,
        max_ngram: int = LONGEST_MATCH,
        min_score: float = 1e-4,
    ) -> Continuations:
        nodes: list[tuple[int, ...]] = []
        scores: list[float] = []
        # (-score, arrival, (token, parent, depth, bucket), occurrences)
        waiting: list[tuple[float, int, tuple[int, ...], list[Occurrence]]] = []
        arrived = 0
        found = list(self._look_up(list(context[-max_ngram:]), min_ngram))
        parent, depth, score = -1, 0, 1.0
        while len(nodes) < max_nodes:
            for token, behind, bucket in self._children(found):
                reach = score * float(rates[bucket])
                if reach >= min_score:
                    node = (token, parent, depth + 1, bucket)
                    longer = [Occurrence(at + 1, min(n + 1, max_ngram)) for at, n in behind]
                    heapq.heappush(waiting, (-reach, arrived, node, longer))
                    arrived += 1
            if not waiting:
                break
            negative, _, best, found = heapq.heappop(waiting)
            parent, depth, score = len(nodes), best[2], -negative
            nodes.append(best)
            scores.append(score)
        return Continuations(np.array(scores), *np.array(nodes, np.int32).reshape(-1, 4).T)

    def _look_up(self, context: list[int], min_ngram: int) -> Iterator[Occurrence]:
        """Yield the newest occurrences of each key of the context, the longest key first."""
        keys = [context[-(1 << k) :] for k in range(NUM_KEYS) if len(context) >= 1 << k]
        places = [at for at in map(self._places, keys) if at]
        for k in reversed(range(len(places))):
            for place in places[k][: VISITS[k]]:
                match_len = self._match_len(place, context)
                covered = k + 1 < len(places) and match_len >= 2 << k
                if match_len >= min_ngram and not covered:
                    yield Occurrence(place, match_len)

    def _places(self, key: list[int]) -> list[int]:
        """Return the places of the tokens that follow a key within a text, newest first."""
        size, log = len(key), self._log
        return [
            place
            for place in range(len(log) - 1, size - 1, -1)
            if log[place] > BORDER and log[place - size : place] == key
        ]

    def _match_len(self, place: int, context: list[int]) -> int:
        length, most = 0, min(place, len(context))
        while length < most and self._log[place - 1 - length] == context[-1 - length]:
            length += 1
        return length

    def _children(self, found: list[Occurrence]) -> Iterator[tuple[int, list[Occurrence], int]]:
        """Yield the next tokens, each with its occurrences and its bucket.

        The longest matches decide about a token; its share is that of all occurrences of their
        level and above.
        """
        followers: dict[int, list[Occurrence]] = {}
        for occurrence in found:
            if occurrence.place < len(self._log) and self._log[occurrence.place] > BORDER:
                followers.setdefault(self._log[occurrence.place], []).append(occurrence)
        levels = [level_of(n) for behind in followers.values() for _, n in behind]
        for token, behind in followers.items():
            level = level_of(max(n for _, n in behind))
            count = sum(level_of(n) == level for _, n in behind)
            total = sum(other >= level for other in levels)
            yield token, behind, bucket_of(level, count, total)
