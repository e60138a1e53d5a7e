"""A drafter that merges the drafts of several sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.drafter import BuiltInDrafter, Drafter, Guard, warn_of_failure
from lookahead_hf.drafting.merge import ANY_TOKEN, head, merge
from lookahead_hf.drafting.rates import Calibration, SourceBackoff, unique_names
from lookahead_hf.stats import SourceStats

if TYPE_CHECKING:
    import torch

    from lookahead_hf.rows import Rows
    from lookahead_hf.runner.transfer import HostCopy


WIDER, WIDE = 4, 64
"""Factor and limit of the merged nodes if a source prunes them: a grammar forbids two of three."""


class Ensemble(Drafter):
    """Merges the trees of its sources by learned acceptance rates.

    A source that raises is left out for the rest of the call, with one warning. A source without
    `sees_all` observes only the steps that ask it and those before.
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
        may_rest: bool = False,
    ) -> None:
        """Give each source its rates in the calibration, which lists the sources in this order.

        Tokens from `vocab_size` on and nodes beyond `max_new_tokens`, a number or [rows], are
        dropped.
        """
        self._sources: list[Any] = list(sources)
        for index, source in enumerate(sources):
            source.rates, _, _ = calibration.of_source(index)
        self._names = unique_names(sources)
        self._calibration = calibration
        self._vocab_size = vocab_size
        self._max_new_tokens = max_new_tokens
        self._guards = [Guard(partial(warn_of_failure, name)) for name in self._names]
        self.backoff = SourceBackoff(len(self._sources), may_rest)
        self._merged: DraftTree | None = None
        self.counts = np.zeros((num_rows, 3, len(self._sources)), np.int64)  # as in `SourceStats`
        self._exclusive = [0] * len(self._sources)  # of the latest step

    def source_stats(self, row: int | None = None) -> dict[str, SourceStats]:
        """Return what each source contributed to one row or to all rows, by name."""
        counts = self.counts.sum(0) if row is None else self.counts[row]
        columns = zip(self._names, self._sources, counts.T.tolist(), strict=True)
        return {
            name: SourceStats(*column)
            for name, source, column in columns
            if getattr(source, "is_listed", True)
        }

    def weigh_sources(self, num_tokens: int = 0, step_seconds: float | None = None) -> None:
        """Weigh each source's time against its tokens; see `SourceBackoff.observe`."""
        if step_seconds is not None:
            seconds = [guard.seconds for guard in self._guards]
            self.backoff.observe(seconds, self._exclusive, num_tokens, step_seconds)
        self._exclusive = [0] * len(self._sources)
        for guard in self._guards:
            guard.seconds = 0.0

    def begin(self, rows: Rows, hidden_states: torch.Tensor | None = None) -> None:
        for guard, source in zip(self._guards, self._sources, strict=True):
            _pass_states(source, hidden_states)
            guard.run(source.begin, rows)
        self.weigh_sources()

    def begin_row(self, rows: Rows, row: int) -> None:
        for guard, source in zip(self._guards, self._sources, strict=True):
            guard.run(source.begin_row, rows, row)

    def end_row(self, rows: Rows, row: int) -> None:
        for guard, source in zip(self._guards, self._sources, strict=True):
            guard.run(source.end_row, rows, row)

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        refining = self._refining()
        wide = max_nodes if refining is None else max(max_nodes, min(WIDER * max_nodes, WIDE))
        nothing = DraftTree.empty(rows.num_rows)
        proposals = []
        for guard, source, asked in self._asked():
            most = wide if getattr(source, "widens", False) else max_nodes
            proposals.append((asked and guard.run(source.propose, rows, most)) or nothing)
        # A node after which the text ends is of no use: the last token is always a bonus token.
        depth = np.where(rows.finished, 0, self._max_new_tokens - 1 - rows.num_emitted)
        self._merged = merge(proposals, self._calibration, wide, self._vocab_size, depth)
        if refining is not None:
            guard, refine = self._guards[refining], self._sources[refining].refine
            refined = guard.run(refine, rows, self._merged, refining, max_nodes, depth)
            self._merged = refined or head(self._merged, max_nodes)
        return self._merged

    def _asked(self) -> Iterator[tuple[Guard, Any, bool]]:
        """Return all sources with their guards and whether this step asks them."""
        return zip(self._guards, self._sources, self.backoff.asked, strict=True)

    def _refining(self) -> int | None:
        """Return the source that refines the draft of all others in this step."""
        found = (
            index
            for index, (guard, source, asked) in enumerate(self._asked())
            if asked and guard.works and getattr(source, "refines", False)
        )
        return next(found, None)

    def prepare(
        self,
        logits: torch.Tensor,
        copy: HostCopy | None = None,
        hidden_states: torch.Tensor | None = None,
    ) -> None:
        """Let the sources begin to read a step's outputs."""
        for guard, source in self._observers():
            _pass_states(source, hidden_states)
            if isinstance(source, BuiltInDrafter):
                guard.run(source.prepare, logits)
                if copy is not None:
                    guard.run(source.bring, copy)
        if copy is not None:
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
        for guard, source in self._observers():
            guard.run(source.observe, rows, draft, verdict, logits)

    def end(self, rows: Rows) -> None:
        for guard, source in zip(self._guards, self._sources, strict=True):
            guard.run(source.end, rows, always=True)

    def _observers(self) -> list[tuple[Guard, Any]]:
        """Return the sources that observe this step, with their guards."""
        return [
            (guard, source)
            for (guard, source, now), soon in zip(
                self._asked(), self.backoff.next_asked, strict=True
            )
            if now or soon or getattr(source, "sees_all", True)
        ]


def _pass_states(source: Drafter, hidden_states: torch.Tensor | None) -> None:
    if isinstance(source, BuiltInDrafter) and source.reads_hidden_states:
        source.hidden_states = hidden_states
