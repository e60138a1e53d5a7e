"""Drafting during one call: sources, learned rates, and how much to draft."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.budget import Budget
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.drafting.ensemble import Ensemble, head, likeliest_chain
from lookahead_hf.drafting.rates import memory_of, placement
from lookahead_hf.drafting.sources.user import UserDrafter
from lookahead_hf.ngram_pool.compilation import drafting
from lookahead_hf.rows import Rows
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.outputs import DeviceOutputs
from lookahead_hf.runner.processes import Processes
from lookahead_hf.stats import SourceStats

if TYPE_CHECKING:
    import torch


_lock = threading.Lock()

_users: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""The session that uses an object, by the object's id. Objects are never compared: `__eq__` is
their author's code, and the lock is held."""


def take(session: Any, sources: Sequence[Drafter]) -> list[Drafter]:
    """Reserve the sources for a session; warn of those that another session uses."""
    with _lock:
        free = [source for source in sources if _key(source) not in _users]
        _users.update((_key(source), session) for source in free)
    for source in sources:
        if all(source is not each for each in free):
            warnings.warn(
                f"the drafter object {source.name!r} drafts for another call at this moment and is "
                "left out of this one: an object serves one call at a time. Give every call an "
                f"object of its own, or the name {source.name!r} instead, which makes a new one "
                "for every call",
                RuntimeWarning,
                stacklevel=4,
            )
    return free


def release(sources: Sequence[Drafter]) -> None:
    """Let other sessions use the sources."""
    with _lock:
        for source in sources:
            _users.pop(_key(source), None)


def _key(source: Drafter) -> int:
    return id(source.wrapped if isinstance(source, UserDrafter) else source)


INVARIANT_WIDTH = 16
"""Tokens per row of every block with `draft_invariant`, whatever the drafters and the budget. Of a
longer chain, seldom more than 15 tokens are accepted."""

NUM_RESTS = 8  # Steps without a draft after a draft whose K or V were not finite
CHAIN_OF = 64  # Nodes of the tree from which a chain is taken


@dataclass(frozen=True)
class Limits:
    """The drafts that a call can use."""

    do_sample: bool
    vocab_size: int
    max_new_tokens: int | np.ndarray  # [rows] if other texts take over finished rows
    chains: bool = False  # whether a row's draft must be a chain


class DraftSession:
    """Proposes drafts of the size that pays, and never changes the text of the call.

    If several processes run the rows of a call, all use the draft of the one that decides.
    `reads_hidden_states` tells whether a source reads the target's last hidden states;
    `num_undrafted` counts steps of each row that came before numba's functions, [rows].
    """

    def __init__(
        self,
        model: Any,
        config: SpeculativeConfig,
        rows: Rows,
        sources: list[Drafter],
        limits: Limits,
        runner: Runner,
        processes: Processes | None = None,
        complete: Callable[[Rows, DraftTree], DraftTree] | None = None,
    ) -> None:
        """Start from what earlier calls learned.

        `processes` decide together if several run the model; `complete` adds nodes that
        verification needs.
        """
        self.reads_hidden_states = any("hidden_states" in each.traits.needs for each in sources)
        self._memory, self._limits = memory_of(model), limits
        self._sources = sources = take(self, sources)
        self._calibration = self._memory.rates.lease(sources, limits.do_sample)
        tokens, length = limits.vocab_size, limits.max_new_tokens
        self._ensemble = Ensemble(
            sources,
            self._calibration,
            rows.num_rows,
            vocab_size=tokens,
            max_new_tokens=length,
            may_rest=config.budget == "auto",
        )
        self._budget = Budget(
            config.budget,
            most_nodes(config, runner),
            self._memory.costs,
            rows,
            runner,
            placement(model) + (" one shape" if runner.has_one_shape else ""),
            length if isinstance(length, int) else None,
        )
        self._processes, self._complete = processes or Processes(), complete
        self._guard = self._ensemble.guard
        self.num_undrafted = np.zeros(rows.num_rows, np.int64)
        self._begun = False
        self._resting = 0

    @property
    def _goes_on(self) -> bool:
        return self._begun and self._guard.works[-1]

    def source_stats(self, row: int | None = None) -> dict[str, SourceStats]:
        return self._ensemble.source_stats(row)

    def begin(self, rows: Rows) -> None:
        """Show the texts to the sources, as soon as numba's functions are ready."""
        if not self._processes.decides or self._begun:
            return
        if drafting.ready():
            self._begun = True
            self._ensemble.begin(rows)
        rows.prompt_states = None

    def begin_row(self, rows: Rows, row: int) -> None:
        """Show the sources a new text in a row."""
        self._ensemble.counts[row] = self.num_undrafted[row] = 0
        if self._goes_on:
            self._ensemble.begin_row(rows, row)

    def end_row(self, rows: Rows, row: int) -> None:
        """Tell the sources that the text of a row has ended."""
        if self._goes_on:
            self._ensemble.end_row(rows, row)

    def propose(self, rows: Rows) -> DraftTree:
        """Return the draft that is worth its cost, possibly an empty one."""
        draft = self._processes.draft(lambda: self._propose(rows))
        return draft if self._complete is None else self._complete(rows, draft)

    def _propose(self, rows: Rows) -> DraftTree:
        self.begin(rows)
        draft = self._guard.run(-1, self._draft, rows)
        return DraftTree.empty(rows.num_rows) if draft is None else draft

    def _draft(self, rows: Rows) -> DraftTree | None:
        most = self._budget.most_nodes
        self._resting = max(0, self._resting - 1)
        if not self._begun:
            if drafting.is_available():
                self.num_undrafted += rows.live
            return None
        if not most or self._resting:
            self._ensemble.backoff.skip_step()
            return None
        if not self._ensemble.backoff.begin_step():
            return None
        tree = self._ensemble.propose(rows, CHAIN_OF if self._limits.chains else most)
        if self._limits.chains:
            tree = likeliest_chain(tree, most)
        return head(tree, self._budget.choose(tree))

    def prepare(self, outputs: Any) -> None:
        """Begin to read the logits of a step that runs."""
        if self._goes_on:
            copy = outputs.copy if isinstance(outputs, DeviceOutputs) else None
            states = getattr(outputs, "hidden_states", None)
            self._guard.run(-1, self._ensemble.prepare, outputs.logits, copy, states)

    def narrow(self, most_nodes: int) -> None:
        """Limit the draft of a row to `most_nodes` for the rest of the call."""
        self._budget.most_nodes = most_nodes

    def spoiled(self, outputs: Any) -> None:
        """Rest for some steps: a draft turned its step's logits into NaN."""
        self._resting = 1 + NUM_RESTS
        self.prepare(outputs)

    def observe(
        self,
        rows: Rows,
        draft: DraftTree,
        verdict: Verdict,
        logits: torch.Tensor,  # [rows, 1 + most nodes, vocab]
        step_seconds: float | None,
    ) -> None:
        """Learn from a step; its seconds are without drafting, None if it also did other work."""
        self._guard.run(-1, self._learn, rows, draft, verdict, logits, step_seconds)

    def _learn(
        self, rows: Rows, draft: DraftTree, verdict: Verdict, logits: Any, seconds: float | None
    ) -> None:
        if not self._begun:  # what the step cost tells nothing: it ran beside the compilation
            return
        self._ensemble.observe(rows, draft, verdict, logits)
        self._ensemble.weigh_sources(len(verdict.of_text.token_ids), seconds)
        self._budget.observe(draft, seconds)

    def end(self, rows: Rows) -> None:
        """Keep what was learned for the model's later calls."""
        try:
            if self._begun:
                self._ensemble.end(rows)  # also after a failure: sources hold resources
                self._memory.rates.merge(self._calibration, self._sources, self._limits.do_sample)
        finally:
            release(self._sources)


def most_nodes(config: SpeculativeConfig, runner: Runner) -> int:
    """Return the most nodes of a row that the configuration and the runner allow."""
    most = config.max_draft_nodes
    if runner.has_one_shape:
        most = min(most, INVARIANT_WIDTH - 1)
    return most if runner.most_nodes is None else min(most, runner.most_nodes)
