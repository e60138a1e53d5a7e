"""The pool in plain Python: what the compiled one must find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from lookahead_hf.ngram_pool.matches import BORDER, NUM_KEYS, VISITS, Continuations, level_of
from tests.oracles.suffix_index import bucket_of, grown


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
        min_ngram: int = 1,
        max_ngram: int = 32,
    ) -> Continuations:
        found = list(self._look_up(list(context[-max_ngram:]), min_ngram))
        return grown(found, partial(self._followers, max_ngram), rates, max_nodes)

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

    def _followers(
        self, max_ngram: int, found: list[Occurrence]
    ) -> Iterator[tuple[int, int, list[Occurrence]]]:
        """Yield the next tokens, each with its bucket and where the text goes on after it.

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
            after = [Occurrence(at + 1, min(n + 1, max_ngram)) for at, n in behind]
            yield token, bucket_of(level, count, total), after
