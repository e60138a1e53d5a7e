"""This project's default drafters as a contender: the objects of a call, without its clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from replay import Contender, Seen

from lookahead_hf.call.prepared import Request
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.drafter import Drafter, Step
from lookahead_hf.drafting.ensemble import Ensemble, head
from lookahead_hf.drafting.rates import KeptRates
from lookahead_hf.drafting.registry import build
from lookahead_hf.drafting.sources.recycling import RecyclingDrafter
from lookahead_hf.rows import Rows

UNUSED = torch.empty(1, 0, 0)
"""Replaces the logits: those that were recorded arrive in `RecordedRecycling.seen`."""


class RecordedRecycling(RecyclingDrafter):
    """Recycles recorded tokens instead of a tensor of logits.

    What a model says after rejected draft tokens was not recorded, so drafts are a little worse
    than in a call.
    """

    seen: Seen

    def observe(self, step: Step) -> None:
        best = self.seen.top_ids.copy(), self.seen.top_probs.copy()
        self._memory.remember(self.seen.before, self.seen.last, *best)  # type: ignore[union-attr]
        self.note_rejected(
            np.zeros(1, np.int64), step.rows.last_tokens, *(part[-1:] for part in best)
        )


class Ours(Contender):
    """The default drafters, merged by learned rates, with a budget of a fixed number of nodes."""

    recycles = True

    def __init__(
        self,
        num_nodes: int,
        new_tokens: int,
        drafters: Sequence[str] | None = None,
        keep: bool = False,
    ) -> None:
        """Draft `num_nodes` in every step.

        Args:
            num_nodes: As `SpeculativeConfig(budget=...)`.
            new_tokens: `max_new_tokens` of the calls.
            drafters: As `SpeculativeConfig(drafters=...)`.
            keep: Whether the memory of logits outlives a text, as `RecyclingDrafter(keep=True)`.
        """
        self.name = f"ours, {num_nodes} nodes" + (", memory kept" if keep else "")
        self.settings = ", ".join(drafters or ("ngram", "recycling"))
        self._num_nodes, self._new_tokens, self._drafters = num_nodes, new_tokens, drafters
        self._kept = RecordedRecycling(keep=True) if keep else None
        self._rates = KeptRates()

    def begin(self, tokens: np.ndarray, prompt: Seen) -> None:
        self._sources, self._recycling = self._build()
        self._calibration = self._rates.lease(self._sources, False)
        self._ensemble = Ensemble(
            self._sources, self._calibration, 1, max_new_tokens=self._new_tokens
        )
        self._rows = Rows(tokens[None, :-1])
        self._rows.emit(0, int(tokens[-1]))
        self._ensemble.begin(self._rows)

    def propose(self) -> DraftTree:
        return head(self._ensemble.propose(self._rows, self._num_nodes), self._num_nodes)

    def observe(self, draft: DraftTree, path: list[int], emitted: np.ndarray, seen: Seen) -> None:
        for token in emitted.tolist():
            self._rows.emit(0, token)
        if self._recycling:
            self._recycling.seen = seen
        verdict = Verdict.from_rows([emitted.tolist()], [path])
        self._ensemble.observe(self._rows, draft, verdict, UNUSED)

    def end(self) -> None:
        self._ensemble.end(self._rows)
        self._rates.merge(self._calibration, self._sources, False)

    def _build(self) -> tuple[list[Drafter], RecordedRecycling | None]:
        sources = build(Request(SpeculativeConfig(self._drafters)))
        for place, source in enumerate(sources):
            if isinstance(source, RecyclingDrafter):
                sources[place] = recycling = self._kept or RecordedRecycling()
                return sources, recycling
        return sources, None
