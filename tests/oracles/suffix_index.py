"""The suffix index in plain Python: what the compiled one must find."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from lookahead_hf.ngram_pool import matches

_State = TypeVar("_State")


@dataclass(frozen=True, eq=False)
class Continuations:
    """A tree of tokens that may follow a text: the fields of a `DraftTree`, and buckets."""

    score: np.ndarray
    token_ids: np.ndarray
    parents: np.ndarray
    depth: np.ndarray
    bucket: np.ndarray


def grown(
    start: _State,
    followers: Callable[[_State], Iterable[tuple[int, int, _State]]],
    rates: Sequence[float],
    max_nodes: int,
    min_score: float = 1e-4,
) -> Continuations:
    """Grow a tree best first; `followers` yields the token, bucket and state after a state."""
    nodes: list[tuple[int, ...]] = []  # token, parent, depth and bucket
    scores: list[float] = []
    waiting: list[tuple[float, int, tuple[int, ...], _State]] = []  # by score and order of arrival
    num_arrived, depth, state, score = 0, 0, start, 1.0
    while len(nodes) < max_nodes:
        for token, bucket, after in followers(state):
            reach = score * float(rates[bucket])
            if reach >= min_score:
                node = (token, len(nodes) - 1, depth + 1, bucket)
                heapq.heappush(waiting, (-reach, num_arrived, node, after))
                num_arrived += 1
        if not waiting:
            break
        negative, _, best, state = heapq.heappop(waiting)
        depth, score = best[2], -negative
        nodes.append(best)
        scores.append(score)
    return Continuations(np.array(scores), *np.array(nodes, np.int32).reshape(-1, 4).T)


@dataclass
class _Found:
    """A token that followed a context: the level of its longest matches, and how many those are."""

    level: int
    count: int = 1


class SuffixIndex:
    """Finds in one row what `ngram_pool.SuffixIndexes` finds; checks no arguments."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def extend(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            for key in self._keys(self._text if token > matches.BORDER else []):
                self._places[key].append(len(self._text))
            self._text.append(token)

    def grow(
        self, rates: Sequence[float], max_nodes: int, context: list[int] | None = None
    ) -> Continuations:
        """Grow a tree after another text, by default after its own."""
        start = self._text if context is None else context[-matches.LONGEST_MATCH :]
        tree = grown(start, self._followers, rates, max_nodes)
        return replace(tree, score=tree.score.astype(np.float32))

    def _keys(self, context: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield the context's last 1, 2, 4 and 8 tokens, as far as they contain no border."""
        for k in range(matches.NUM_KEYS):
            key = tuple(context[-(1 << k) :])
            if len(key) < 1 << k or min(key) <= matches.BORDER:
                return
            yield key

    def _followers(self, context: list[int]) -> Iterator[tuple[int, int, list[int]]]:
        """Yield the tokens that followed the context, each with its bucket and the text with it.

        The newest occurrences of each key are visited, those of long keys first. The longest
        matches decide about a token; its share is that of all occurrences of their level and above.
        """
        found: dict[int, _Found] = {}
        occurrences = [0] * len(matches.LEVELS)
        for place, match_len in self._occurrences(context):
            token, level = self._text[place], matches.level_of(match_len)
            occurrences[level] += 1
            known = found.get(token)
            if known is None or level > known.level:
                found[token] = _Found(level)
            elif level == known.level:
                known.count += 1
        for token, follower in found.items():
            total = sum(occurrences[follower.level :])
            yield token, bucket_of(follower.level, follower.count, total), [*context, token]

    def _occurrences(self, context: list[int]) -> Iterator[tuple[int, int]]:
        """Yield place and match length of every occurrence to visit, none of them twice."""
        keys = [key for key in self._keys(context) if self._places.get(key)]
        for k in reversed(range(len(keys))):
            for place in reversed(self._places[keys[k]][-matches.VISITS[k] :]):
                match_len = self._match_len(place, context)
                covered = k + 1 < len(keys) and match_len >= 2 << k
                if not covered:
                    yield place, match_len

    def _match_len(self, place: int, context: list[int]) -> int:
        length = 0
        while (
            length < min(place, len(context), matches.LONGEST_MATCH)
            and self._text[place - 1 - length] == context[-1 - length] > matches.BORDER
        ):
            length += 1
        return length


def bucket_of(level: int, count: int, total: int) -> int:
    """Return the class of a continuation by match level, share in quarters, and total."""
    share = -(-matches.NUM_SHARES * count // total) - 1
    return (
        (level * matches.NUM_SHARES + share) * matches.NUM_TOTALS
        + min(matches.NUM_TOTALS, total)
        - 1
    )
