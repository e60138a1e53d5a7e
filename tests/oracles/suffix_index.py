"""The suffix index in plain Python: what the compiled one must find."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lookahead_hf.ngram_pool.matches import (
    BORDER,
    LEVELS,
    LONGEST_MATCH,
    NUM_KEYS,
    NUM_SHARES,
    NUM_TOTALS,
    VISITS,
    Continuations,
    level_of,
)


@dataclass
class _Found:
    """A token that followed a context: its longest match, and its count at that level."""

    level: int
    match_len: int
    count: int = 1


class SuffixIndex:
    """Finds what `ngram_pool.SuffixIndex` finds; checks no arguments."""

    def __init__(self, min_ngram: int = 1, max_ngram: int = LONGEST_MATCH) -> None:
        self._min_ngram, self._max_ngram = min_ngram, max_ngram
        self._text: list[int] = []
        self._start = 0
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._text) - self._start

    def add_reference(self, token_ids: Sequence[int]) -> None:
        self.extend([*token_ids, BORDER])
        self._start = len(self._text)

    def extend(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            for key in self._keys(self._text if token > BORDER else []):
                self._places[key].append(len(self._text))
            self._text.append(token)

    def grow(
        self, rates: Sequence[float], max_nodes: int, min_score: float = 1e-4
    ) -> Continuations:
        nodes: list[tuple[int, ...]] = []
        scores: list[float] = []
        # (-score, order of arrival, path, (token, parent, depth, match, count, total, bucket))
        waiting: list[tuple[float, int, list[int], tuple[int, ...]]] = []
        arrived = 0
        parent, path, score = -1, list[int](), 1.0
        while len(nodes) < max_nodes:
            for token, (match_len, count, total) in self._followers(self._text + path):
                bucket = bucket_of(match_len, count, total)
                reach = score * float(rates[bucket])
                if reach >= min_score:
                    node = (token, parent, len(path) + 1, match_len, count, total, bucket)
                    heapq.heappush(waiting, (-reach, arrived, [*path, token], node))
                    arrived += 1
            if not waiting:
                break
            negative, _, path, best = heapq.heappop(waiting)
            parent, score = len(nodes), -negative
            nodes.append(best)
            scores.append(score)
        table = np.array(nodes, np.int32).reshape(-1, 7).T
        return Continuations(np.array(scores), *table)

    def _keys(self, context: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield the context's last 1, 2, 4 and 8 tokens, as far as they contain no border."""
        for k in range(NUM_KEYS):
            key = tuple(context[-(1 << k) :])
            if len(key) < 1 << k or len(key) > self._max_ngram or min(key) <= BORDER:
                return
            yield key

    def _followers(self, context: list[int]) -> Iterator[tuple[int, tuple[int, int, int]]]:
        """Yield the tokens that followed the context, with their match length, count and total.

        The newest occurrences of each key are visited, those of long keys first. The longest
        matches decide about a token; `total` counts all occurrences of their level and above.
        """
        found: dict[int, _Found] = {}
        occurrences = [0] * len(LEVELS)
        for place, match_len in self._occurrences(context):
            token, level = self._text[place], level_of(match_len)
            occurrences[level] += 1
            known = found.get(token)
            if known is None or level > known.level:
                found[token] = _Found(level, match_len)
            elif level == known.level:
                known.count += 1
                known.match_len = max(known.match_len, match_len)
        for token, follower in found.items():
            total = sum(occurrences[follower.level :])
            yield token, (follower.match_len, follower.count, total)

    def _occurrences(self, context: list[int]) -> Iterator[tuple[int, int]]:
        """Yield place and match length of every occurrence to visit, none of them twice."""
        keys = [key for key in self._keys(context) if self._places.get(key)]
        for k in reversed(range(len(keys))):
            for place in reversed(self._places[keys[k]][-VISITS[k] :]):
                match_len = self._match_len(place, context)
                covered = k + 1 < len(keys) and match_len >= 2 << k
                if match_len >= self._min_ngram and not covered:
                    yield place, match_len

    def _match_len(self, place: int, context: list[int]) -> int:
        length = 0
        while (
            length < min(place, len(context), self._max_ngram)
            and self._text[place - 1 - length] == context[-1 - length] > BORDER
        ):
            length += 1
        return length


def bucket_of(match_len: int, count: int, total: int) -> int:
    """Return the class of a continuation by match length, share in quarters, and total."""
    share = -(-NUM_SHARES * count // total) - 1
    level = level_of(match_len)
    return (level * NUM_SHARES + share) * NUM_TOTALS + min(NUM_TOTALS, total) - 1
