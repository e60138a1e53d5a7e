"""Drafts for the first steps of a process, while numba's functions are compiled or loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lookahead_hf.draft import DraftTree, Evidence
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.drafting.sources.ngram import ONLY_CONTINUATION, NgramDrafter
from lookahead_hf.ngram_pool.matches import level_of

if TYPE_CHECKING:
    from lookahead_hf.rows import Rows


class PromptLookup:
    """Drafts what followed the longest match of a text's end in the text, one chain per row.

    It stands in for the n-gram source, if the call has one. The idea is prompt lookup decoding
    (Saxena, 2023), which transformers offers as `prompt_lookup_num_tokens`.

    Attributes:
        source: Index of the n-gram source among the sources of the call; None if there is none.
    """

    def __init__(
        self, sources: Sequence[Drafter], vocab_size: int, max_new_tokens: int | np.ndarray
    ) -> None:
        """Draft for one call; tokens from `vocab_size` on are never drafted."""
        self._vocab_size, self._max_new_tokens = vocab_size, max_new_tokens
        self.source: int | None = None
        self._limits = (1, 1)
        for index, source in enumerate(sources):
            if isinstance(source, NgramDrafter):
                self.source, self._limits = index, source.limits

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        """Return a chain of at most `max_nodes` nodes for each row that has a match."""
        left = np.where(rows.live, self._max_new_tokens - 1 - rows.num_emitted, 0)
        most = np.clip(left, 0, max_nodes if self.source is not None else 0)
        chains = [self._chain(rows.context(row), size) for row, size in enumerate(most.tolist())]
        tree = DraftTree.from_chains([[tokens] for tokens, _ in chains])
        evidence = Evidence(
            np.arange(tree.num_nodes + 1),
            np.full(tree.num_nodes, self.source or 0, np.int32),
            np.zeros(tree.num_nodes, np.int32),
        )
        score = np.concatenate([scores for _, scores in chains])
        return replace(tree, score=score, evidence=evidence)

    def _chain(self, context: np.ndarray, max_nodes: int) -> tuple[list[int], np.ndarray]:
        """Return what followed the longest match of a context, [tokens], and its scores.

        A score is how likely a node is accepted. Each accepted node makes the match longer by one,
        and a longer match is right more often.
        """
        start, length = longest_match(context, self._limits[1]) if max_nodes else (0, 0)
        if length < self._limits[0]:
            return [], np.empty(0, np.float32)
        # A text that is shorter from there on repeats itself.
        chain = np.resize(context[start : start + max_nodes], max_nodes)
        beyond = np.flatnonzero((chain < 0) | (chain >= self._vocab_size))
        chain = chain[: beyond[0]] if len(beyond) else chain
        levels = [level_of(length + place) for place in range(len(chain))]
        rates = np.array(ONLY_CONTINUATION, np.float32)[levels]
        return chain.tolist(), rates.cumprod(dtype=np.float32)


def longest_match(context: np.ndarray, max_ngram: int) -> tuple[int, int]:
    """Find the longest n-gram at the end of a context, [tokens], that it also has before.

    Returns:
        The index of the token behind the latest such match, and the number of tokens that match, 0
        without a match.
    """
    ends = np.flatnonzero(context[:-1] == context[-1]) + 1
    if not len(ends):
        return 0, 0
    length = 1
    while length < max_ngram:
        longer = ends[ends > length]
        longer = longer[context[longer - 1 - length] == context[len(context) - 1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return int(ends[-1]), length
