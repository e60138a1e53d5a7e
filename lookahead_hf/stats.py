"""What a call did: `SpeculativeStats`, and where the latest ones of a model are kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from lookahead_hf.model_state import state_of
from lookahead_hf.trace import Trace
from lookahead_hf.trace.page import notebook
from lookahead_hf.trace.steps import PARTS

PHASES = PARTS
"""Parts of a call that are timed."""


@dataclass(frozen=True, slots=True)
class RowStats:
    """Counts of one row: steps in which it was live, tokens emitted, drafted and accepted."""

    row_steps: int
    num_emitted: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class SourceStats:
    """Nodes of one source: verified, accepted, and accepted that no other source proposed."""

    drafted: int
    accepted: int
    exclusive: int

    def __add__(self, other: SourceStats) -> SourceStats:
        return SourceStats(
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.exclusive + other.exclusive,
        )


@dataclass(frozen=True, slots=True)
class SpeculativeStats:
    """Statistics of one call of `generate`.

    Attributes:
        rows: Rows of the batch. Where `generate` decodes several times, as Whisper's does for every
            segment, all numbers are added up.
        num_steps: Forwards of the target after the prefill.
        row_steps: Steps in which a row was live, added up over the rows.
        num_emitted: Tokens emitted, the one after the prefill included.
        num_drafted: Draft tokens verified.
        num_accepted: Draft tokens accepted.
        num_moved: Accepted tokens that were moved in the cache, because a rejected node came before
            them.
        accepted_histogram: At index k, the number of row steps that accepted k draft tokens.
        max_width: Most nodes side by side in a row's draft; 1 where all drafts were chains.
        per_source: What each source contributed, by name.
        prefill_ms: Time of the prefill.
        draft_ms: Time spent drafting and learning.
        forward_ms: Time spent on laying out and running the target's forwards.
        verify_ms: Time spent verifying.
        commit_ms: Time spent on the cache after verification.
        budget_histogram: Number of steps by the most draft tokens of a row in the step.
        engine: How the call was verified.
        execution: How the steps were run: "model" by the model's own forward, "packed" by the same
            with packed linear layers under it, "replayed" as CUDA graphs; on a device else why not.
        fallback_reason: Why nothing was speculated, None where it was.
        row_stats: Counts of each row.
        trace: Every step of the call, if the configuration asked for it by `trace=True`.
    """

    rows: int = 0
    num_steps: int = 0
    row_steps: int = 0
    num_emitted: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_moved: int = 0
    accepted_histogram: tuple[int, ...] = ()
    max_width: int = 0
    per_source: Mapping[str, SourceStats] = field(default_factory=dict)
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    forward_ms: float = 0.0
    verify_ms: float = 0.0
    commit_ms: float = 0.0
    budget_histogram: Mapping[int, int] = field(default_factory=dict)
    engine: str | None = None
    execution: str | None = None
    fallback_reason: str | None = None
    row_stats: tuple[RowStats, ...] = ()
    trace: Trace | None = field(default=None, repr=False)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per row step; plain decoding is 1.0 in any batch, nan where no step ran."""
        if not self.row_steps:
            return math.nan
        return (self.num_emitted - self.rows) / self.row_steps

    @property
    def acceptance_rate(self) -> float:
        """Accepted of the drafted tokens, nan where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else math.nan

    @property
    def graphs(self) -> str | None:
        """The same as `execution`, under its earlier name."""
        return self.execution

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values, both rates included; None where a rate is nan."""
        values = dataclasses.asdict(self)
        for name in ("accepted_histogram", "row_stats"):
            values[name] = list(values[name])
        values["budget_histogram"] = {str(n): count for n, count in self.budget_histogram.items()}
        if self.fallback_reason is not None:
            values["fallback_reason"] = str(self.fallback_reason)
        for name in ("tokens_per_step", "acceptance_rate"):
            rate = getattr(self, name)
            values[name] = None if math.isnan(rate) else rate
        return values

    def with_text(self, tokenizer: Any) -> SpeculativeStats:
        """Return the same statistics with the text of the traced tokens; see `Trace.with_text`."""
        return dataclasses.replace(self, trace=self.trace and self.trace.with_text(tokenizer))

    def _repr_html_(self) -> str:
        """Return a table of the main numbers, and the text of a trace by who foresaw it."""
        return notebook(str(self), self.trace)

    def __str__(self) -> str:
        if self.fallback_reason is not None:
            return f"plain generate, nothing was speculated: {self.fallback_reason}"
        speed = f"{self.tokens_per_step:.2f}" if self.row_steps else "no"
        rate = f" ({self.acceptance_rate:.0%})" if self.num_drafted else ""
        ready = self.execution in ("replayed", "packed")
        lines = [
            f"{speed} tokens per step: {_counted(self.num_emitted, 'token')} in "
            f"{_counted(self.num_steps, 'step')}, {_counted(self.rows, 'row')}, "
            f"engine {self.engine}" + (f", steps {self.execution}" if ready else ""),
            f"{self.num_accepted} of {self.num_drafted} draft tokens accepted{rate}, "
            f"{self.num_moved} moved in the cache",
            "ms: " + ", ".join(f"{phase} {getattr(self, phase + '_ms'):.1f}" for phase in PHASES),
        ]
        lines += [
            f"{name}: {source.accepted} of {source.drafted} accepted, {source.exclusive} alone"
            for name, source in self.per_source.items()
        ]
        return "\n".join(lines)


def joined(first: SpeculativeStats, second: SpeculativeStats) -> SpeculativeStats:
    """Return the sum of two decodings of one call of `generate`."""
    both = {
        each.name: (getattr(first, each.name), getattr(second, each.name))
        for each in dataclasses.fields(first)
    }
    return SpeculativeStats(
        **{name: _JOINED.get(name, _sum)(*values) for name, values in both.items()}
    )


def _sum(first: Any, second: Any) -> Any:
    return first + second


def _by_place(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(first, second, fillvalue=0))


def _by_key(first: Mapping[Any, Any], second: Mapping[Any, Any]) -> dict[Any, Any]:
    shared = {key: first[key] + second[key] for key in first if key in second}
    return {**first, **second, **shared}


def _traced(first: Trace | None, second: Trace | None) -> Trace | None:
    return first + second if first and second else first or second


def _listed(first: str | None, second: str | None) -> str | None:
    return ", ".join(dict.fromkeys(each for each in (first, second) if each)) or None


_JOINED: dict[str, Callable[[Any, Any], Any]] = {
    "accepted_histogram": _by_place,
    "max_width": max,
    "per_source": _by_key,
    "budget_histogram": _by_key,
    "engine": _listed,
    "execution": _listed,
    "fallback_reason": _listed,
    "trace": _traced,
}
"""How fields are joined that are not added up."""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def publish(model: Any, stats: SpeculativeStats | None) -> None:
    """Keep the statistics of the latest call on a model; None after a plain call."""
    state = state_of(model)
    state.stats_of_thread.stats = state.stats = stats


def last_stats(model: Any) -> SpeculativeStats | None:
    """Return the statistics of this thread's latest call on a model, or else of any thread's."""
    state = state_of(model)
    latest: SpeculativeStats | None = getattr(state.stats_of_thread, "stats", state.stats)
    return latest
