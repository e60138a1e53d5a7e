"""Several sources that draft together as one drafter."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.calibration import Calibration, unique_names
from lookahead_hf.drafting.drafter import BuiltInDrafter, Drafter, warn_of_failure
from lookahead_hf.drafting.tree import ANY_TOKEN, merge
from lookahead_hf.stats import SourceStats

if TYPE_CHECKING:
    import torch

    from lookahead_hf.rows import Rows
    from lookahead_hf.runner.cuda.transfer import HostCopy


class Ensemble(Drafter):
    """Merges the trees of its sources by learned acceptance rates.

    A source that raises is left out for the rest of the call, with one warning; the others go on.

    Attributes:
        asked: Sources that `propose` asks, by default all.
        next_asked: Sources that the next step may ask. A source that neither step asks observes a
            step only if it has `sees_all`.
        counts: The fields of `SourceStats` for each row and source, [rows, 3, sources] int64.
    """

    name = "ensemble"

    def __init__(
        self,
        sources: Sequence[Drafter],
        calibration: Calibration,
        num_rows: int,
        *,
        vocab_size: int = ANY_TOKEN,
        max_new_tokens: int | np.ndarray = 2**31,
    ) -> None:
        """Draft with `sources`, in the order of `calibration`.

        Args:
            sources: The drafters; their `rates` are views of the calibration.
            calibration: Learned rates of these sources.
            num_rows: Rows of the drafts.
            vocab_size: Tokens with this id or a higher one are never drafted.
            max_new_tokens: Length of the texts, for all rows or [rows], which may change later;
                nodes beyond it are not drafted.
        """
        self._sources = list(sources)
        self._names = unique_names(sources)
        self._calibration = calibration
        self._vocab_size = vocab_size
        self._max_new_tokens = max_new_tokens
        self._working = [True] * len(self._sources)
        self.asked = self.next_asked = [True] * len(self._sources)
        self._merged: DraftTree | None = None
        self.counts = np.zeros((num_rows, 3, len(self._sources)), np.int64)
        self._exclusive = [0] * len(self._sources)  # of the latest step
        self._seconds = [0.0] * len(self._sources)

    def source_stats(self, row: int | None = None) -> dict[str, SourceStats]:
        """Return what each source contributed so far, to one row or to all, by name."""
        counts = self.counts.sum(0) if row is None else self.counts[row]
        columns = zip(self._names, counts.T.tolist(), strict=True)
        return {name: SourceStats(*column) for name, column in columns}

    def settle(self) -> tuple[list[float], list[int]]:
        """Return and reset each source's seconds and accepted nodes that only it proposed."""
        settled = self._seconds, self._exclusive
        self._seconds, self._exclusive = [0.0] * len(self._sources), [0] * len(self._sources)
        return settled

    def begin(self, rows: Rows, hidden_states: torch.Tensor | None = None) -> None:
        for index, source in enumerate(self._sources):
            _show(source, hidden_states)
            self._guarded(index, "begin", rows)
        self.settle()

    def begin_row(self, rows: Rows, row: int) -> None:
        for index in range(len(self._sources)):
            self._guarded(index, "begin_row", rows, row)

    def end_row(self, rows: Rows, row: int) -> None:
        for index in range(len(self._sources)):
            self._guarded(index, "end_row", rows, row)

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        proposals = [
            (asked and self._guarded(index, "propose", rows, max_nodes))
            or DraftTree.empty(rows.num_rows)
            for index, asked in enumerate(self.asked)
        ]
        self._merged = merge(
            proposals, self._calibration, max_nodes, self._vocab_size, self._max_depth(rows)
        )
        return self._merged

    def prepare(
        self,
        logits: torch.Tensor,
        copy: HostCopy | None = None,
        hidden_states: torch.Tensor | None = None,
    ) -> None:
        """Let the sources begin to read a step's outputs; see `BuiltInDrafter`."""
        for index, source in self._seeing():
            _show(source, hidden_states)
            if isinstance(source, BuiltInDrafter):
                self._guarded(index, "prepare", logits)
                if copy is not None:
                    self._guarded(index, "bring", copy)
        if copy is not None:
            copy.send()

    def observe(self, rows: Rows, draft: DraftTree, verdict: Verdict, logits: torch.Tensor) -> None:
        from lookahead_hf.drafting._learning_numba import count_sources

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
        for index, _ in self._seeing():
            self._guarded(index, "observe", rows, draft, verdict, logits)

    def count_chains(self, draft: DraftTree, verdict: Verdict) -> None:
        """Count a draft that is a chain from one source in each row, without numba."""
        assert draft.evidence is not None
        starts = draft.evidence.offsets[draft.row_offsets]
        drafted, accepted = np.diff(starts), verdict.of_text.num_accepted
        rows = np.flatnonzero(drafted)
        source = draft.evidence.source[starts[rows]]
        self.counts[rows, :, source] += np.stack([drafted, accepted, accepted], 1)[rows]

    def end(self, rows: Rows) -> None:
        for index in range(len(self._sources)):
            self._guarded(index, "end", rows, always=True)

    def _seeing(self) -> list[tuple[int, Drafter]]:
        """The sources that have to observe this step."""
        asked = zip(self._sources, self.asked, self.next_asked, strict=True)
        return [
            (index, source)
            for index, (source, now, soon) in enumerate(asked)
            if now or soon or getattr(source, "sees_all", True)
        ]

    def _guarded(self, index: int, method: str, *arguments: Any, always: bool = False) -> Any:
        """Run a source's method; None if the source was left out or raises."""
        if not (self._working[index] or always):
            return None
        start = perf_counter()
        try:
            return getattr(self._sources[index], method)(*arguments)
        except Exception as error:
            if self._working[index]:
                self._working[index] = False
                warn_of_failure(self._names[index], error)
        finally:
            self._seconds[index] += perf_counter() - start
        return None

    def _max_depth(self, rows: Rows) -> np.ndarray:
        """Greatest useful depth per row: a bonus token follows it, and finished rows need none."""
        depth: np.ndarray = self._max_new_tokens - 1 - rows.num_emitted
        depth[rows.finished] = 0
        return depth


def _show(source: Drafter, hidden_states: torch.Tensor | None) -> None:
    """Give a source the hidden states that it reads; see `BuiltInDrafter`."""
    if isinstance(source, BuiltInDrafter) and source.reads_hidden_states:
        source.hidden_states = hidden_states
