"""RACER (arXiv 2604.14885): frequent n-grams first, a tree of recycled logits in the room left."""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from operator import itemgetter

import numpy as np
from replay import Contender, Seen

from lookahead_hf.draft import DraftTree
from peers.token_recycling import BEST, RecyclingTree

Ngram = tuple[int, ...]


class NgramTrie:
    """Prefixes of n-grams with their counts; beyond a capacity the least recently used ones go."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._counts: OrderedDict[Ngram, int] = OrderedDict()  # the least recently used first
        self._next: defaultdict[Ngram, list[int]] = defaultdict(list)

    def insert(self, ngram: Ngram) -> None:
        """Count an n-gram and all its prefixes."""
        for length in range(len(ngram), 0, -1):  # a prefix outlives what continues it
            prefix = ngram[:length]
            if prefix not in self._counts:
                self._next[prefix[:-1]].append(prefix[-1])
            self._counts[prefix] = self._counts.get(prefix, 0) + 1
            self._counts.move_to_end(prefix)
        while len(self._counts) > self._capacity:
            oldest, _ = self._counts.popitem(last=False)
            self._next[oldest[:-1]].remove(oldest[-1])

    def continuations(self, context: Ngram) -> Iterator[tuple[int, int, Ngram]]:
        """Yield what followed a context, level by level: negative count, length in all, tokens."""
        level = [context] if context in self._counts else []
        for prefix in level:
            self._touch(prefix)
        while level:
            for prefix in level:
                yield -self._counts[prefix], len(prefix), prefix[len(context) :]
            level = [(*prefix, t) for prefix in level for t in self._next.get(prefix, [])]

    def _touch(self, prefix: Ngram) -> None:
        for length in range(len(prefix), 0, -1):
            self._counts.move_to_end(prefix[:length])


class Racer(Contender):
    """The likeliest tokens by both sources, 64 with the last one.

    As published: n-grams of 10 tokens in a trie of 10,000 nodes, matches of 2 or more, and the best
    8 logits of each token. All matches of the text's end share the room by frequency. What they
    leave is for a tree of logits, whose breadth halves from level to level and from sibling to
    sibling. Both memories are kept between texts, and the prompt's logits are recycled too. The
    authors renew the automaton that finds the matches only after a prompt; here all are found.
    """

    name = "RACER"
    recycles = True

    def __init__(
        self, capacity: int = 64, ngram_size: int = 10, least_match: int = 2, trie: int = 10_000
    ) -> None:
        self.settings = f"{ngram_size}-grams, matches of >= {least_match}, {capacity - 1} nodes"
        self._capacity, self._ngram_size, self._least_match = capacity, ngram_size, least_match
        self._trie = NgramTrie(trie)
        self._logits = RecyclingTree(())

    def begin(self, tokens: np.ndarray, prompt: Seen) -> None:
        self._tokens: list[int] = []
        self._logits.learn(prompt)
        self._add(tokens)

    def propose(self) -> DraftTree:
        kept = self._retrieved()
        room = self._capacity - 1 - len(kept)
        return DraftTree.from_chains([[*kept, *self._guessed(room)]])

    def observe(self, draft: DraftTree, path: list[int], emitted: np.ndarray, seen: Seen) -> None:
        self._logits.learn(seen)
        self._add(emitted)

    def _add(self, tokens: np.ndarray) -> None:
        """Count the n-grams of verified tokens, thus not those that end in the last one."""
        known = max(len(self._tokens), self._ngram_size)
        self._tokens.extend(tokens.tolist())
        for end in range(known, len(self._tokens)):
            self._trie.insert(tuple(self._tokens[end - self._ngram_size : end]))

    def _retrieved(self) -> list[Ngram]:
        """Return the most frequent continuations; each match also takes the room of a node."""
        end = tuple(self._tokens[-self._ngram_size :])
        found = (
            each
            for length in range(len(end), self._least_match - 1, -1)
            for each in self._trie.continuations(end[-length:])
        )
        best = heapq.nsmallest(self._capacity, found, key=itemgetter(0, 1))
        return [tokens for _, _, tokens in best]

    def _guessed(self, room: int) -> list[Ngram]:
        """Return at most `room` paths of the tree of logits, from its root on."""
        paths: list[tuple[Ngram, int]] = [((), BEST)]
        for path, breadth in paths:
            left = breadth if not path else breadth // 2
            for token in self._logits.best_after((*self._tokens[-1:], *path)[-1])[:breadth]:
                if len(paths) > room:
                    return [path for path, _ in paths]
                paths.append(((*path, token), max(1, left)))
                left //= 2
        return [path for path, _ in paths]
