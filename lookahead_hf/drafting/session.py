"""Drafting during one call: the sources, what they have learned, and how much to draft."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead_hf import ngram_pool
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting import loans
from lookahead_hf.drafting.budget import Budget
from lookahead_hf.drafting.calibration import KeptRates
from lookahead_hf.drafting.cost_model import CostModel
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.drafting.ensemble import Ensemble, SourceCounts
from lookahead_hf.drafting.registry import Resources, build
from lookahead_hf.drafting.scheduler import Roster
from lookahead_hf.drafting.sources.prompt_logits import seed
from lookahead_hf.drafting.sources.recycling import RecyclingDrafter
from lookahead_hf.drafting.tree import head, likeliest_chain
from lookahead_hf.model_state import state_of
from lookahead_hf.rows import Rows
from lookahead_hf.runner.cuda.runner import DeviceOutputs
from lookahead_hf.runner.host import Runner

if TYPE_CHECKING:
    import torch


OWN_POOL_TOKENS = 1_000_000

INVARIANT_WIDTH = 16
"""Tokens per row of every block where the text may not depend on the draft: the same for all
drafters and budgets. A chain of 15 is seldom accepted further."""

MOST_RESTS = 15
"""Most steps without a draft after one that has spoiled its step."""

CHAIN_OF = 64
"""Nodes of the tree from which such a chain is taken."""


class ModelMemory:
    """What drafting keeps of a model between calls: rates and costs, and tokens only in a pool."""

    def __init__(self) -> None:
        self.rates = KeptRates()
        self.costs = CostModel()
        self._pool: ngram_pool.NgramPool | None = None

    def own_pool(self) -> ngram_pool.NgramPool:
        """The model's own pool; it stays empty unless a call is told to learn."""
        with _lock:
            self._pool = self._pool or ngram_pool.NgramPool(max_tokens=OWN_POOL_TOKENS)
            return self._pool


_lock = threading.Lock()


def memory_of(model: Any) -> ModelMemory:
    """The model's memory, made at its first call."""
    state = state_of(model)
    with state.lock:
        state.drafting = state.drafting or ModelMemory()
        return state.drafting


def _most_nodes(config: SpeculativeConfig) -> int:
    """Most nodes that a row's draft can have in a call."""
    if config.draft_invariant:
        return min(config.max_draft_nodes, INVARIANT_WIDTH - 1)
    return config.max_draft_nodes


def cost_setting(model: Any) -> str:
    """What tells the costs of one model apart, beside rows and lengths."""
    return f"{model.device} {model.dtype}"


def sources_of(
    model: Any, config: SpeculativeConfig, num_rows: int, resources: Resources
) -> list[Drafter]:
    """The sources that a configuration names, before any work: nothing is run or shown to them.

    Raises:
        ValueError: An option or a pool is wrong, a drafter lacks what it drafts with, or the
            predictions are not as many as the rows.
    """
    _check_predictions(resources.predictions, num_rows)
    own_pool = memory_of(model).own_pool
    return build(config.drafters, config.options, replace(resources, own_pool=own_pool))


class DraftSession:
    """Proposes drafts of the size that pays, and never costs the call its text."""

    def __init__(
        self,
        model: Any,
        config: SpeculativeConfig,
        rows: Rows,
        sources: list[Drafter],
        *,
        do_sample: bool,
        vocab_size: int,
        max_new_tokens: int,
        target: Runner,
        chains: bool = False,
    ) -> None:
        """Draft with what `sources_of` gave, and go on from what earlier calls learned.

        `chains`: whether a row's draft must be a chain.
        """
        self._memory = memory_of(model)
        self._do_sample = do_sample
        self._sources = sources = loans.take(self, sources)
        self._calibration = self._memory.rates.lease(sources, do_sample)
        self._ensemble = Ensemble(
            sources,
            self._calibration,
            vocab_size=vocab_size,
            max_new_tokens=max_new_tokens,
        )
        self._budget = Budget(
            config.budget,
            min(_most_nodes(config), target.most_nodes or config.max_draft_nodes),
            self._memory.costs,
            rows,
            cost_setting(model) + (" one shape" if config.draft_invariant else ""),
            lambda: target.mode,
        )
        self._roster = Roster(len(sources), may_rest=config.budget == "auto")
        self._chain = chains
        self._prompt, self._max_new_tokens = target.prompt, max_new_tokens
        self._seconds = 0.0
        self._failed = False
        self._begun = False
        self._rest = self._resting = 0
        self._was_spoiled = False

    @property
    def source_counts(self) -> dict[str, SourceCounts]:
        """Drafted, accepted and exclusive nodes of each source."""
        return self._ensemble.source_counts

    def begin(self, rows: Rows) -> None:
        """Show the texts to the sources; until numba has compiled, the call goes on plainly."""
        try:
            if not ngram_pool.ready():
                return
            self._begun = True
            self._guarded(lambda: self._begin(rows))
        finally:
            self._prompt.drop()

    def _begin(self, rows: Rows) -> None:
        self._ensemble.begin(rows)
        if self._budget.wanted():
            for source in self._sources:
                if isinstance(source, RecyclingDrafter):
                    seed(source, rows, self._prompt, self._max_new_tokens)

    def propose(self, rows: Rows) -> DraftTree:
        """The draft that is worth its cost, nothing where none is."""
        if not self._begun:
            self.begin(rows)
        self._seconds = 0.0
        draft = self._timed(lambda: self._propose(rows)) if self._begun else None
        return DraftTree.empty(rows.num_rows) if draft is None else draft

    def _propose(self, rows: Rows) -> DraftTree | None:
        self._resting = max(0, self._resting - 1)
        wanted = 0 if self._resting else self._budget.wanted()
        self._roster.begin_step(wanted > 0)
        self._ensemble.asked = self._roster.asked
        draft = self._drafted(rows, wanted) if wanted else None
        soon = self._budget.asks_next
        self._ensemble.next_asked = [soon and each for each in self._roster.next_asked]
        return draft

    def _drafted(self, rows: Rows, wanted: int) -> DraftTree:
        if self._chain:
            tree = likeliest_chain(self._ensemble.propose(rows, CHAIN_OF), wanted)
        else:
            tree = self._ensemble.propose(rows, wanted)
        return head(tree, self._budget.choose(tree))

    def prepare(self, outputs: Any) -> None:
        """A step was launched: index what was learned before, and start to look at its logits."""
        if self._begun:
            copy = outputs.copy if isinstance(outputs, DeviceOutputs) else None
            self._timed(lambda: self._ensemble.prepare(outputs.logits, copy))

    def spoiled(self, outputs: Any) -> None:
        """A draft spoiled its step, which was run again: rest for some steps, ever more of them."""
        self._rest = min(2 * self._rest + 1, MOST_RESTS)
        self._resting, self._was_spoiled = self._rest + 1, True
        self.prepare(outputs)

    def observe(
        self,
        rows: Rows,
        draft: DraftTree,
        verdict: Verdict,
        logits: torch.Tensor,  # [rows, 1 + most nodes, vocab]
        step_seconds: float,
    ) -> None:
        """Learn from a step that took `step_seconds` beside the drafting."""
        if self._begun:
            self._timed(lambda: self._ensemble.observe(rows, draft, verdict, logits))
            if not self._was_spoiled:  # whose seconds are those of two steps
                self._guarded(lambda: self._account(draft, verdict, step_seconds))
            self._was_spoiled = False

    def _account(self, draft: DraftTree, verdict: Verdict, step_seconds: float) -> None:
        """Learn what the step cost and brought."""
        seconds, alone = self._ensemble.settle()
        others = max(0.0, self._seconds - sum(seconds))
        num_tokens = len(verdict.of_text.token_ids)
        self._roster.observe(seconds, alone, others, num_tokens, step_seconds)
        self._budget.observe(draft, verdict, step_seconds, self._roster.seconds)

    def end(self, rows: Rows) -> None:
        """Hand what was learned to the model's later calls."""
        try:
            if self._begun:
                self._ensemble.end(rows)  # also after a failure: sources have things to give back
                self._memory.rates.merge(self._calibration, self._sources, self._do_sample)
        finally:
            loans.give_back(self._sources)

    def _timed(self, call: Callable[[], Any]) -> Any:
        """As `_guarded`, counted as time of the step's drafting."""
        start = perf_counter()
        result = self._guarded(call)
        self._seconds += perf_counter() - start
        return result

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """Run a part of drafting; where it raises, the call goes on without drafts."""
        if self._failed:
            return None
        try:
            return call()
        except Exception as error:
            self._failed = True
            warnings.warn(
                f"drafting failed and is given up for this call, whose text is not affected: "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=3,
            )
            return None


def _check_predictions(predictions: Sequence[np.ndarray] | None, num_rows: int) -> None:
    """One prediction for all rows, or as many for each prompt."""
    if predictions is not None and (not predictions or num_rows % len(predictions)):
        raise ValueError(
            f"prediction holds {len(predictions)} texts, but the batch has {num_rows} rows: give "
            "one for every row (an empty list where there is none), or a single one for all"
        )
