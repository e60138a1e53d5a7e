"""LogitSpec (arXiv 2507.01449): the last logits guess the token after next, lookup continues."""

from __future__ import annotations

import numpy as np
from replay import Contender, Seen

from lookahead_hf.draft import DraftTree


class LogitSpec(Contender):
    """Chains from an n-gram table: one after the last token, one after each guess for the next.

    As published: n-grams of at most 3 tokens, 20 copied tokens, 64 tokens including the last one. A
    guess and its copied tokens are 4 tokens up to rank 8, 3 up to rank 32, then 1. The latest
    continuation of full length counts for an n-gram. Shared prefixes are merged here, which only
    frees nodes.
    """

    name = "LogitSpec"

    def __init__(self, ngram_size: int = 3, num_copied: int = 20, capacity: int = 64) -> None:
        self.settings = f"n-grams of <= {ngram_size}, {num_copied} copied, {capacity - 1} nodes"
        self._ngram_size, self._num_copied, self._capacity = ngram_size, num_copied, capacity

    def begin(self, tokens: np.ndarray, prompt: Seen) -> None:
        self._table: dict[tuple[int, ...], list[int]] = {}
        self._tokens = tokens.tolist()
        self._guesses = prompt.top_ids[-1].tolist()
        self._note(0, len(self._tokens) - 1)

    def propose(self) -> DraftTree:
        room = self._capacity - 1
        chains = [self._continuation(self._tokens)]
        room -= len(chains[0])
        for rank, guess in enumerate(self._guesses):
            if room <= 0:
                break
            if guess == self._tokens[-1]:
                continue
            chain = [guess, *self._continuation([*self._tokens[-self._ngram_size :], guess])]
            chains.append(chain[: min(_length_at(rank), room)])
            room -= len(chains[-1])
        return DraftTree.from_chains([chains])

    def observe(self, draft: DraftTree, path: list[int], emitted: np.ndarray, seen: Seen) -> None:
        self._tokens.extend(emitted.tolist())
        self._guesses = seen.top_ids[-1].tolist()
        end = len(self._tokens) - 1  # the last token is drafted from, but not verified yet
        self._note(max(0, end - 2 * self._num_copied), end)

    def _note(self, start: int, end: int) -> None:
        """Update the continuations of the n-grams that begin in `start` to `end`."""
        for first in range(start, end):
            for size in range(1, self._ngram_size + 1):
                after = self._tokens[first + size : min(first + size + self._num_copied, end)]
                key = tuple(self._tokens[first : first + size])
                if after and len(after) >= len(self._table.get(key, ())):
                    self._table[key] = after

    def _continuation(self, tokens: list[int]) -> list[int]:
        for size in range(self._ngram_size, 0, -1):
            found = self._table.get(tuple(tokens[-size:]))
            if found:
                return found
        return []


def _length_at(rank: int) -> int:
    if rank <= 8:
        return 4
    return 3 if rank <= 32 else 1
