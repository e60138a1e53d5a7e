"""Drafts while numba's functions are compiled or loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lookahead_hf.draft import DraftTree, Evidence
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.drafting.sources.ngram import ONLY_CONTINUATION, NgramDrafter
from lookahead_hf.drafting.sources.prediction import PredictionDrafter
from lookahead_hf.ngram_pool.matches import level_of

if TYPE_CHECKING:
    from lookahead_hf.rows import Rows


class Chain(NamedTuple):
    """A row's draft from one source; a score is the probability of the path to a node."""

    source: int  # index among the sources of the call
    token_ids: np.ndarray  # [nodes] int64
    scores: np.ndarray  # [nodes]


class UncompiledDrafts:
    """Drafts one chain per row, from the caller's prediction or by prompt lookup.

    It replaces these two sources, if the call has them. Prompt lookup (Saxena, 2023; transformers'
    `prompt_lookup_num_tokens`) proposes what followed the longest match of the text's end.
    """

    def __init__(
        self, sources: Sequence[Drafter], vocab_size: int, max_new_tokens: int | np.ndarray
    ) -> None:
        """Draft for one call, never tokens from `vocab_size` on."""
        self._sources, self._vocab_size = sources, vocab_size
        self._max_new_tokens = max_new_tokens
        self._has_begun = False

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        """Return a chain of at most `max_nodes` nodes for each row that has one."""
        if not self._has_begun:
            self._has_begun = True
            for source in self._sources:
                if isinstance(source, PredictionDrafter):
                    source.begin(rows)
        left = np.where(rows.live, self._max_new_tokens - 1 - rows.num_emitted, 0)
        most = np.clip(left, 0, max_nodes).tolist()
        chains = [self._best_chain(rows, row, size) for row, size in enumerate(most)]
        tree = DraftTree.from_chains([[chain.token_ids.tolist()] for chain in chains])
        source_of = [np.full(len(chain.token_ids), chain.source, np.int32) for chain in chains]
        evidence = Evidence(
            np.arange(tree.num_nodes + 1),
            np.concatenate(source_of),
            np.zeros(tree.num_nodes, np.int32),
        )
        score = np.concatenate([chain.scores for chain in chains], dtype=np.float32)
        return replace(tree, score=score, evidence=evidence)

    def _best_chain(self, rows: Rows, row: int, max_nodes: int) -> Chain:
        """Return the chain whose first token is the likeliest."""
        chains = [Chain(0, np.empty(0, np.int64), np.empty(0))]
        for index, source in enumerate(self._sources if max_nodes else ()):
            if isinstance(source, PredictionDrafter):
                predicted = source.chains(rows, row, max_nodes)[:1]
                chains += [Chain(index, ids, scores) for ids, _, scores in predicted]
            elif isinstance(source, NgramDrafter):
                chains.append(Chain(index, *repeated(rows.context(row), max_nodes, source.limits)))
        return max(map(self._cut, chains), key=lambda chain: chain.scores[:1].sum())

    def _cut(self, chain: Chain) -> Chain:
        """End a chain before the first id that is no token of the target."""
        beyond = (chain.token_ids < 0) | (chain.token_ids >= self._vocab_size)
        end = int(beyond.argmax()) if beyond.any() else len(beyond)
        return Chain(chain.source, chain.token_ids[:end], chain.scores[:end])


def repeated(
    context: np.ndarray, max_nodes: int, limits: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return what followed the longest match of a context, [tokens], and its scores.

    Each accepted node makes the match one longer, and longer matches are right more often. `limits`
    are the shortest and longest match length.
    """
    start, length = longest_match(context, limits[1])
    num_nodes = max_nodes if length >= limits[0] else 0
    # A text that is shorter from there on repeats itself.
    chain = np.resize(context[start : start + num_nodes], num_nodes)
    levels = [level_of(length + place) for place in range(num_nodes)]
    return chain, np.array(ONLY_CONTINUATION)[levels].cumprod()


def longest_match(context: np.ndarray, max_ngram: int) -> tuple[int, int]:
    """Find the longest n-gram at the end of a context, [tokens], that also occurs before.

    Returns the index after its latest occurrence and its length, 0 without a match.
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
