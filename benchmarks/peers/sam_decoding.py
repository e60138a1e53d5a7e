"""SAM-Decoding (arXiv 2411.10666) with its Token Recycling tree, the training-free version."""

from __future__ import annotations

import numpy as np
from replay import Contender, Seen

from lookahead_hf.draft import DraftTree
from peers.suffix_automaton import SuffixAutomaton
from peers.token_recycling import RecyclingTree

TEMPLATE_60 = ((7,), (6, 5, 3, 2, 2, 1, 1)) + (
    (3, 2, 2, 1, 1, 0, 3, 2, 1, 1, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0),
    (2, 1, 0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0),
    (2, 0, 1, 0, 1, 0, 0, 0),
)
"""Children of every node, level by level from the root, of the authors' tree (hyx1999/SAM-Decoding
18c41f0), 60 nodes without the last token."""


class SamDecoding(Contender):
    """A copied chain if the text's end has a long enough match, else a recycling tree.

    As published: chains of 40 tokens including the last one, for matches of 5 or more tokens,
    without a corpus. The tree recycles the prompt's logits too, and keeps its table between texts.
    """

    name = "SAM-Decoding[Recycling]"
    recycles = True

    def __init__(self, num_tokens: int = 40, least_match: int = 5) -> None:
        self.settings = f"matches of >= {least_match}: {num_tokens - 1} tokens; else 60 nodes"
        self._num_tokens, self._least_match = num_tokens, least_match
        self._tree = RecyclingTree(TEMPLATE_60)

    def begin(self, tokens: np.ndarray, prompt: Seen) -> None:
        self._automaton = SuffixAutomaton()
        self._tree.learn(prompt)
        self._add(tokens)

    def propose(self) -> DraftTree:
        state, length = self._automaton.matched(self._last)
        if length >= self._least_match:
            return DraftTree.from_chains([[self._copied(state)]])
        return self._tree.grow(self._last)

    def observe(self, draft: DraftTree, path: list[int], emitted: np.ndarray, seen: Seen) -> None:
        self._tree.learn(seen)
        self._add(np.concatenate([[self._last], emitted]))

    def _add(self, tokens: np.ndarray) -> None:
        """Add all but the last token, which is matched when a draft is requested."""
        self._automaton.extend(tokens[:-1].tolist())
        self._last = int(tokens[-1])

    def _copied(self, state: int) -> list[int]:
        """Copy what followed the first occurrence, or that of a shorter match if it is too near."""
        states, tokens = self._automaton.states, self._automaton.tokens
        while states[state].link and len(tokens) - states[state].first_end < self._num_tokens:
            state = states[state].link
        start = states[state].first_end
        return tokens[start : start + self._num_tokens - 1]
