"""What a call did: `SpeculativeStats`, the recorder that makes them, and where they are kept."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from lookahead_hf.draft import DraftTree, Verdict

PHASES = ("prefill", "draft", "forward", "verify", "commit")
"""Parts of a call that are timed."""


@dataclass(frozen=True, slots=True)
class RowStats:
    """What one row did: steps in which it was live, tokens emitted, drafted and accepted."""

    row_steps: int
    num_emitted: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class SourceStats:
    """What one source proposed: nodes verified, accepted, and accepted that no other proposed."""

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
    """What one call of `generate` did.

    Attributes:
        rows: Rows of the batch; where `generate` decodes several times, as Whisper's does for
            every segment, the numbers of all of them are added up.
        num_steps: Forwards of the target after the prefill.
        row_steps: Over all rows, the steps in which the row was live.
        num_emitted: Tokens emitted, the one after the prefill included.
        num_drafted: Draft tokens verified.
        num_accepted: Draft tokens accepted.
        num_moved: Accepted tokens that were moved in the cache, as a sibling stood before them.
        accepted_histogram: At index k, the row steps in which k draft tokens were accepted.
        max_width: Most nodes side by side in a row's draft; 1 where all drafts were chains.
        per_source: What each source contributed, by name.
        prefill_ms: Time of the prefill.
        draft_ms: Time spent drafting and learning.
        forward_ms: Time of the target's forwards.
        verify_ms: Time spent verifying.
        commit_ms: Time spent on laying out steps and on the cache.
        budget_histogram: How many steps were laid out for how many draft tokens per row.
        engine: How the call was verified.
        execution: How the steps were run: "model" by the model's own forward, "packed" by the same
            with packed linear layers under it, "replayed" as CUDA graphs; on a device else why not.
        fallback_reason: Why nothing was speculated, None where it was.
        row_stats: What each row did.
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
    """One record of what one call of `generate` decoded first and then decoded."""
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


def _said(first: str | None, second: str | None) -> str | None:
    return ", ".join(dict.fromkeys(each for each in (first, second) if each)) or None


_JOINED: dict[str, Callable[[Any, Any], Any]] = {
    "accepted_histogram": _by_place,
    "max_width": max,
    "per_source": _by_key,
    "budget_histogram": _by_key,
    "engine": _said,
    "execution": _said,
    "fallback_reason": _said,
}
"""How fields are joined that are not added up."""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class _Rows(Protocol):
    @property
    def num_text(self) -> np.ndarray: ...  # [rows]


class _Drafts(Protocol):
    @property
    def source_counts(self) -> Mapping[str, Any]: ...


class StatsRecorder:
    """Counts and times the steps of one call.

    Attributes:
        step_seconds: What the latest step took beside the drafting.
    """

    step_seconds = 0.0

    def __init__(self, num_rows: int) -> None:
        self._steps = 0
        self._moved = 0
        self._max_width = 0
        self._milliseconds = dict.fromkeys(PHASES, 0.0)
        self._before = 0.0
        self._row_steps = np.zeros(num_rows, np.int64)
        self._drafted = np.zeros(num_rows, np.int64)
        self._accepted = np.zeros(num_rows, np.int64)
        self._accepted_histogram: Counter[int] = Counter()
        self._budgets: Counter[int] = Counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside as part of a phase, one of `PHASES`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._milliseconds[name] += (time.perf_counter() - start) * 1e3

    def leave_out(self, name: str, seconds: float) -> None:
        """Take off a phase what was spent in it on something else."""
        self._milliseconds[name] -= seconds * 1e3

    def observe(self, draft: DraftTree, verdict: Verdict, num_moved: int = 0) -> None:
        """Count a step.

        Args:
            draft: What was verified.
            verdict: What was accepted.
            num_moved: Accepted tokens that the commit had to move in the cache.
        """
        drafted, accepted = np.diff(draft.row_offsets), verdict.of_text.num_accepted
        self._steps += 1
        total = sum(self._milliseconds[name] for name in ("forward", "verify", "commit"))
        self.step_seconds = (total - self._before) / 1e3
        self._before = total
        self._moved += num_moved
        self._row_steps += verdict.live
        self._drafted += np.where(verdict.live, drafted, 0)
        self._accepted += accepted
        self._accepted_histogram.update(accepted[verdict.live].tolist())
        self._budgets[int(drafted.max(initial=0))] += 1
        self._max_width = max(self._max_width, _width(draft, drafted))

    def finish(
        self, rows: _Rows, engine: str, drafts: _Drafts, execution: str | None = None
    ) -> SpeculativeStats:
        """Return the record of the call.

        Args:
            rows: The call's rows, which know what they emitted.
            engine: How the call was verified.
            drafts: The call's drafts, which know what each source contributed.
            execution: How the steps were run.
        """
        per_row = (self._row_steps, rows.num_text, self._drafted, self._accepted)
        row_stats = [RowStats(*counts) for counts in np.stack(per_row, 1).tolist()]
        deepest = max(self._accepted_histogram, default=-1)
        spent = self._milliseconds
        return SpeculativeStats(
            rows=len(row_stats),
            num_steps=self._steps,
            row_steps=sum(row.row_steps for row in row_stats),
            num_emitted=sum(row.num_emitted for row in row_stats),
            num_drafted=sum(row.num_drafted for row in row_stats),
            num_accepted=sum(row.num_accepted for row in row_stats),
            num_moved=self._moved,
            accepted_histogram=tuple(self._accepted_histogram[k] for k in range(deepest + 1)),
            max_width=self._max_width,
            per_source={
                name: SourceStats(counts.drafted, counts.accepted, counts.exclusive)
                for name, counts in drafts.source_counts.items()
            },
            budget_histogram=dict(sorted(self._budgets.items())),
            engine=engine,
            execution=execution,
            row_stats=tuple(row_stats),
            prefill_ms=spent["prefill"],
            draft_ms=spent["draft"],
            forward_ms=spent["forward"],
            verify_ms=spent["verify"],
            commit_ms=spent["commit"],
        )


def _width(draft: DraftTree, drafted: np.ndarray) -> int:
    """Most nodes at one depth of one row."""
    if not draft.num_nodes:
        return 0
    level = draft.depth
    if len(drafted) > 1:
        level = level + np.repeat(np.arange(len(drafted)) * (level.max() + 1), drafted)
    return int(np.bincount(level).max())


_lock = threading.Lock()
_latest: WeakKeyDictionary[Any, SpeculativeStats | None] = WeakKeyDictionary()
_thread = threading.local()


def publish(model: Any, stats: SpeculativeStats | None) -> None:
    """Keep what the latest call on `model` did; None after a plain call."""
    if not hasattr(_thread, "latest"):
        _thread.latest = WeakKeyDictionary()
    _thread.latest[model] = stats
    with _lock:
        _latest[model] = stats


def last_stats(model: Any) -> SpeculativeStats | None:
    """Return what the latest call on `model` did: this thread's if it made one, else any."""
    own = getattr(_thread, "latest", {})
    if model in own:
        return own[model]
    with _lock:
        return _latest.get(model)
