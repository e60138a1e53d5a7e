"""Merges the drafts of several sources by shared prefixes, and cuts drafts out of the result."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead_hf.draft import ROOT, DraftTree, Evidence, Verdict, place_in_row
from lookahead_hf.drafting.drafter import BestTokens, Drafter, Guard, Refiner, Step, warn_of_failure
from lookahead_hf.drafting.rates import Calibration, SourceBackoff, unique_names
from lookahead_hf.stats import SourceStats

if TYPE_CHECKING:
    import torch

    from lookahead_hf.rows import Rows
    from lookahead_hf.runner.outputs import HostCopy

ANY_TOKEN = 2**62  # Vocabulary size if it is unknown


def merge(
    proposals: Sequence[DraftTree],
    calibration: Calibration,
    max_nodes: int,
    vocab_size: int = ANY_TOKEN,
    max_depth: np.ndarray | None = None,
) -> DraftTree:
    """Unite the trees of a calibration's sources and keep each row's likeliest nodes, best first.

    Nodes with a token id from `vocab_size` on are left out with all nodes below them, and so are
    nodes deeper than `max_depth`, [rows]. Path probabilities, the new scores, follow from the
    calibration alone; nodes without evidence are in bucket 0. All sources of a node are in the new
    evidence.

    The first source with `probs` draws: the nodes on its path of first children come before all
    others, so that neither their tokens nor another source's decide whether they are kept, and
    keep what they were drawn from. All other nodes are certain.
    """
    from lookahead_hf.drafting._numba import merge_trees

    row_offsets = np.array([tree.row_offsets for tree in proposals], np.int64)
    row_offsets[1:] += row_offsets[:-1, -1].cumsum()[:, None]
    token_ids = np.concatenate([tree.token_ids for tree in proposals], dtype=np.int64)
    parents = np.concatenate([tree.parents for tree in proposals], dtype=np.int32)
    sizes, buckets = zip(*map(_evidence_of, proposals), strict=True)
    entry_offsets = np.zeros(len(token_ids) + 1, np.int64)
    np.concatenate(sizes).cumsum(out=entry_offsets[1:])
    if max_depth is None:
        max_depth = np.full(row_offsets.shape[1] - 1, len(token_ids) + 1, np.int64)
    drawing = next((i for i, tree in enumerate(proposals) if tree.probs is not None), -1)
    offsets, tokens, parents, depth, score, entries, source, bucket, drawn = merge_trees(
        row_offsets, token_ids, parents, entry_offsets, np.concatenate(buckets, dtype=np.int32),
        calibration.rates, calibration.bucket_starts, max_depth, vocab_size, max_nodes, drawing,
    )  # fmt: skip
    evidence = Evidence(entries, source, bucket)
    tree = DraftTree(offsets, tokens, parents, depth, score, evidence)
    return tree if drawing < 0 else replace(tree, probs=proposals[drawing].probs, drawn=drawn)


def head(tree: DraftTree, num_nodes: int | np.ndarray) -> DraftTree:
    """Keep the first `num_nodes` (of all rows, or [rows]) of a merged tree, in depth-first order.

    The likeliest child comes first. So an accepted path is mostly in consecutive slots after the
    last token, and committing it moves no cache data.
    """
    from lookahead_hf.drafting._numba import head_order

    counts = np.minimum(np.diff(tree.row_offsets), num_nodes)
    offsets, order, parents = head_order(tree.row_offsets, tree.parents, counts)
    return _taken(tree, offsets, order, parents)


def likeliest_chain(tree: DraftTree, max_nodes: int | np.ndarray) -> DraftTree:
    """Keep a path per row of a merged tree, by the likeliest children, to `max_nodes` nodes."""
    longest = np.broadcast_to(max_nodes, tree.num_rows).tolist()
    order: list[int] = []
    offsets = np.zeros(tree.num_rows + 1, np.int64)
    for row in range(tree.num_rows):
        nodes = tree.row(row)
        at, first = ROOT, len(order)
        # Children come after their parents, so one pass over the nodes is the walk.
        for node, parent in enumerate(tree.parents[nodes].tolist()):
            if parent == at and len(order) - first < longest[row]:
                order.append(nodes.start + node)
                at = node
        offsets[row + 1] = len(order)
    parents = (place_in_row(offsets) - 1).astype(np.int32)
    return _taken(tree, offsets, np.array(order, np.int64), parents)


def _taken(
    tree: DraftTree, offsets: np.ndarray, order: np.ndarray, parents: np.ndarray
) -> DraftTree:
    return DraftTree(
        offsets,
        tree.token_ids[order],
        parents,
        tree.depth[order],
        tree.score[order],
        _take_evidence(tree.evidence, order),
        tree.probs,
        None if tree.drawn is None else tree.drawn[order],
    )


def _evidence_of(tree: DraftTree) -> tuple[np.ndarray, np.ndarray]:
    """Return how many entries each node of a source's tree has, [nodes], and all their buckets."""
    if tree.evidence is not None:
        return np.diff(tree.evidence.offsets), tree.evidence.bucket
    return np.ones(tree.num_nodes, np.int64), np.zeros(tree.num_nodes, np.int32)


def _take_evidence(evidence: Evidence | None, order: np.ndarray) -> Evidence | None:
    if evidence is None:
        return None
    begin = evidence.offsets[order]
    sizes = evidence.offsets[order + 1] - begin
    offsets = np.concatenate([np.zeros(1, np.int64), sizes.cumsum()])
    # Entry i of the result is as far from its node's first entry as in the old evidence.
    entries = np.arange(offsets[-1]) + np.repeat(begin - offsets[:-1], sizes)
    return Evidence(offsets, evidence.source[entries], evidence.bucket[entries])


WIDER, WIDE = 4, 64
"""Factor and limit of the merged nodes if a source prunes them: a grammar forbids two of three."""


class Ensemble:
    """Merges the trees of its sources by learned acceptance rates.

    A source that raises is left out for the rest of the call, with one warning. A source without
    the trait `sees_all` observes only the steps that ask it, and the step before each of them.

    Attributes:
        guard: Runs the sources, by their numbers, and as the last part drafting as a whole.
    """

    def __init__(
        self,
        sources: Sequence[Drafter],
        calibration: Calibration,
        num_rows: int,
        *,
        vocab_size: int = ANY_TOKEN,
        max_new_tokens: int | np.ndarray = 2**31,
        may_rest: bool = False,
    ) -> None:
        """Give each source its rates in the calibration, which lists the sources in this order.

        Tokens from `vocab_size` on are dropped, and nodes beyond `max_new_tokens`, also [rows].
        """
        self._sources = list(sources)
        for index, source in enumerate(sources):
            source.rates, _, _ = calibration.of_source(index)
        self._names = unique_names(sources)
        self._calibration = calibration
        self._vocab_size = vocab_size
        self._max_new_tokens = max_new_tokens
        self.guard = Guard([*(partial(warn_of_failure, name) for name in self._names), warn_of_end])
        self.backoff = SourceBackoff(len(self._sources), may_rest)
        self._merged: DraftTree | None = None
        self.counts = np.zeros((num_rows, 3, len(self._sources)), np.int64)  # as in `SourceStats`
        self._exclusive = [0] * len(self._sources)  # of the latest step
        self._best: BestTokens | None = None
        self._hidden_states: torch.Tensor | None = None

    def source_stats(self, row: int | None = None) -> dict[str, SourceStats]:
        """Return what each source contributed to one row or to all rows, by name."""
        counts = self.counts.sum(0) if row is None else self.counts[row]
        columns = zip(self._names, self._sources, counts.T.tolist(), strict=True)
        return {
            name: SourceStats(*column)
            for name, source, column in columns
            if not isinstance(source, Refiner) or source.is_listed
        }

    def weigh_sources(self, num_tokens: int = 0, step_seconds: float | None = None) -> None:
        """Weigh each source's time against its tokens; see `SourceBackoff.observe`."""
        if step_seconds is not None:
            seconds = self.guard.seconds[:-1]
            self.backoff.observe(seconds, self._exclusive, num_tokens, step_seconds)
        self._exclusive = [0] * len(self._sources)
        self.guard.seconds[:] = [0.0] * len(self.guard.seconds)

    def _all(self, method: str, *arguments: Any, always: bool = False) -> None:
        for index, source in enumerate(self._sources):
            self.guard.run(index, getattr(source, method), *arguments, always=always)

    def begin(self, rows: Rows) -> None:
        self._all("begin", rows)
        self.weigh_sources()

    def begin_row(self, rows: Rows, row: int) -> None:
        self._all("begin_row", rows, row)

    def end_row(self, rows: Rows, row: int) -> None:
        self._all("end_row", rows, row)

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        refining = self._refining()
        wide = max_nodes if refining is None else max(max_nodes, min(WIDER * max_nodes, WIDE))
        proposals = [DraftTree.empty(rows.num_rows)] * len(self._sources)
        for index in np.flatnonzero(self.backoff.asked).tolist():
            source = self._sources[index]
            most = wide if source.traits.widens else max_nodes
            found = self.guard.run(index, source.propose, rows, most)
            proposals[index] = found or proposals[index]
        # A node after which the text ends is of no use: the last token is always a bonus token.
        depth = np.where(rows.finished, 0, self._max_new_tokens - 1 - rows.num_emitted)
        self._merged = merge(proposals, self._calibration, wide, self._vocab_size, depth)
        if refining is not None:
            index, refine = refining
            refined = self.guard.run(index, refine, rows, self._merged, index, max_nodes, depth)
            self._merged = refined or head(self._merged, max_nodes)
        return self._merged

    def _refining(self) -> tuple[int, Callable[..., DraftTree]] | None:
        for index in np.flatnonzero(self.backoff.asked).tolist():
            source = self._sources[index]
            if isinstance(source, Refiner) and source.refines and self.guard.works[index]:
                return index, source.refine
        return None

    def prepare(
        self,
        logits: torch.Tensor,
        copy: HostCopy | None = None,
        hidden_states: torch.Tensor | None = None,
    ) -> None:
        """Keep what `observe` will need of a step, and begin to search its logits on a device."""
        self._hidden_states, self._best = hidden_states, None
        needs = [self._sources[index].traits.needs for index in self._observers()]
        counts = [each["best_tokens"] for each in needs if "best_tokens" in each]
        if counts:
            few, most = map(max, zip(*counts, strict=True))
            self._best = BestTokens(logits, most, few)
        if copy is not None:
            if self._best is not None:
                self._best.prefetch(copy)
            copy.send()

    def observe(self, rows: Rows, draft: DraftTree, verdict: Verdict, logits: torch.Tensor) -> None:
        from lookahead_hf.drafting._numba import count_sources

        of_text = verdict.of_text
        if self._merged is not None:
            # Calibration learns from nodes that were not verified, too.
            self._calibration.update(self._merged, of_text)
            self._merged = None
        if draft.evidence is not None:
            self._exclusive = count_sources(
                draft.row_offsets, draft.evidence.offsets, draft.evidence.source,
                of_text.path_offsets, of_text.path, self.counts,
            ).tolist()  # fmt: skip
        step = Step(rows, draft, verdict, logits, self._hidden_states, self._best)
        for index in self._observers():
            self.guard.run(index, self._sources[index].observe, step)
        self._hidden_states = self._best = None  # the next step overwrites them

    def end(self, rows: Rows) -> None:
        self._all("end", rows, always=True)

    def _observers(self) -> list[int]:
        asked = zip(self._sources, self.backoff.asked, self.backoff.next_asked, strict=True)
        return [
            index
            for index, (source, now, soon) in enumerate(asked)
            if now or soon or source.traits.sees_all
        ]


def warn_of_end(error: Exception) -> None:
    """Warn that a call drafts no more, since drafting itself raised an error."""
    warnings.warn(
        f"drafting failed and stops for this call, whose text is not affected: "
        f"{type(error).__name__}: {error}",
        RuntimeWarning,
        stacklevel=4,
    )
