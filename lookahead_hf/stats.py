"""Statistics of calls: `SpeculativeStats` of one, `Totals` of several, and callbacks."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from itertools import zip_longest
from operator import add
from typing import Any

from lookahead_hf.model.state import kept
from lookahead_hf.trace import PARTS, Trace
from lookahead_hf.utils import unwrap


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
        return SourceStats(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class SpeculativeStats:
    """Statistics of a call of `generate` or `generate_batch`, or of a request of the latter.

    A request counts what it alone causes, and its share of the time of common steps, so that
    requests add up to their run. A step counts for every request that decodes in it. A prompt that
    several requests share is charged to the one that read it.

    Attributes:
        rows: Rows of the batch. Several decodings of one `generate`, as in Whisper's, are added up.
        num_steps: Forwards of the target after the prefill.
        row_steps: Steps in which a row was live, added up over the rows.
        num_emitted: Tokens emitted, the one after the prefill included.
        num_drafted: Draft tokens verified.
        num_accepted: Draft tokens accepted.
        num_undrafted: Row steps without a draft because the functions of drafting were still being
            compiled.
        num_moved: Accepted tokens that were moved in the cache, to where rejected nodes had been.
        accepted_histogram: At index k, the number of row steps that accepted k draft tokens.
        per_source: What each source contributed, by name.
        prefill_ms: Time of the prefill.
        draft_ms: Time spent drafting and learning.
        forward_ms: Time spent on laying out and running the target's forwards.
        verify_ms: Time spent verifying.
        commit_ms: Time spent on the cache after verification.
        budget_histogram: Number of steps by the most draft tokens of a row in the step.
        engine: How the call was verified.
        execution: How the latest step was run: "model" by the model's own forward, "compiled" by
            compiled kernels, "replayed" as CUDA graphs; on a device else the reason against that.
        layers: On a CPU, how many layers kernels computed in the latest step ("compiled"), and how
            many ran their own code ("model"): decoder layers, and linear layers outside of those
            that kernels compute. Empty if the call did not look for any.
        own_code: Why layers ran their own code in any step, on a CPU or for want of an engine.
        num_fed: Tokens that the target was fed in the prefill and in steps, padding included.
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
    num_undrafted: int = 0
    num_moved: int = 0
    accepted_histogram: tuple[int, ...] = ()
    per_source: Mapping[str, SourceStats] = field(default_factory=dict)
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    forward_ms: float = 0.0
    verify_ms: float = 0.0
    commit_ms: float = 0.0
    budget_histogram: Mapping[int, int] = field(default_factory=dict)
    engine: str | None = None
    execution: str | None = None
    layers: Mapping[str, int] = field(default_factory=dict)
    own_code: tuple[str, ...] = ()
    num_fed: int = 0
    fallback_reason: str | None = None
    row_stats: tuple[RowStats, ...] = ()
    trace: Trace | None = field(default=None, repr=False)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per row step; plain decoding is 1.0 in any batch, nan where no step ran."""
        return (self.num_emitted - self.rows) / self.row_steps if self.row_steps else math.nan

    @property
    def acceptance_rate(self) -> float:
        """Accepted of the drafted tokens, nan where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else math.nan

    def to_dict(self, style: str = "full") -> dict[str, Any]:
        """Return the statistics as JSON values.

        Args:
            style: "full" returns every field and both rates; a rate that is nan becomes None.
                "vllm" returns the fields of vLLM's statistics of one request with all row steps.

        Raises:
            ValueError: The style is unknown.
        """
        if style == "vllm":  # which knows no nan
            accepted, drafted, steps = self.num_accepted, self.num_drafted, self.row_steps
            return {
                "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
                "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
                "acceptance_histogram": list(self.accepted_histogram),
                "num_spec_steps": steps,
                "num_accepted_draft_tokens": accepted,
                "num_draft_tokens": drafted,
            }
        if style != "full":
            raise ValueError(f"style={style!r} is not known; known: full, vllm")
        values = asdict(self)
        for name in ("accepted_histogram", "own_code", "row_stats"):
            values[name] = list(values[name])
        values["budget_histogram"] = {str(n): count for n, count in self.budget_histogram.items()}
        values["fallback_reason"] = self.fallback_reason and str(self.fallback_reason)
        for name in ("tokens_per_step", "acceptance_rate"):
            rate = getattr(self, name)
            values[name] = None if math.isnan(rate) else rate
        return values

    def with_text(self, tokenizer: Any) -> SpeculativeStats:
        """Return the same statistics with the text of the traced tokens; see `Trace.with_text`."""
        return replace(self, trace=self.trace and self.trace.with_text(tokenizer))

    def __str__(self) -> str:
        if self.fallback_reason is not None:
            return f"plain generate, nothing was speculated: {self.fallback_reason}"
        speed = f"{self.tokens_per_step:.2f}" if self.row_steps else "no"
        rate = f" ({self.acceptance_rate:.0%})" if self.num_drafted else ""
        ready = f", steps {self.execution}" if self.execution in ("replayed", "compiled") else ""
        lines = [
            f"{speed} tokens per step: {_counted(self.num_emitted, 'token')} in "
            f"{_counted(self.num_steps, 'step')}, {_counted(self.rows, 'row')}, "
            f"engine {self.engine}{ready}",
            f"{self.num_accepted} of {self.num_drafted} draft tokens accepted{rate}, "
            f"{self.num_moved} moved in the cache",
            "ms: " + ", ".join(f"{phase} {getattr(self, f'{phase}_ms'):.1f}" for phase in PARTS),
        ]
        if self.num_undrafted:
            steps = f"{_counted(self.num_undrafted, 'step')} of {self.row_steps}"
            lines.append(f"{steps} drafted nothing: drafting was being compiled")
        if self.own_code:
            own, count = self.layers.get("model", 0), sum(self.layers.values())
            ran = f"{own} of {count} layers" if count else "all layers"
            lines.append(f"the model's own code ran {ran}: {'; '.join(self.own_code)}")
        lines += [
            f"{name}: {source.accepted} of {source.drafted} accepted, {source.exclusive} alone"
            for name, source in self.per_source.items()
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over `num_calls` calls that asked for speculation.

    `fallbacks` counts those that ran plain `generate`, by reason. `stats` is the sum of the other
    calls, without `row_stats`.
    """

    num_calls: int = 0
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    stats: SpeculativeStats = field(default_factory=SpeculativeStats)

    def plus(self, record: SpeculativeStats) -> Totals:
        if record.fallback_reason is not None:
            fallbacks = _by_key(self.fallbacks, {str(record.fallback_reason): 1})
            return replace(self, num_calls=self.num_calls + 1, fallbacks=fallbacks)
        added = joined(self.stats, replace(record, row_stats=(), trace=None))
        return replace(self, num_calls=self.num_calls + 1, stats=added)

    def __str__(self) -> str:
        plain = "".join(f", {count} plain ({name})" for name, count in self.fallbacks.items())
        calls = f"{_counted(self.num_calls, 'call')}{plain}"
        return f"{calls}\n{self.stats}" if self.stats.rows else calls


def joined(first: SpeculativeStats, second: SpeculativeStats) -> SpeculativeStats:
    """Return the sum of two decodings of a call, or of two requests; of a plain one, the other."""
    if first.fallback_reason is not None:
        return second
    if second.fallback_reason is not None:
        return first
    values: dict[str, Any] = {}
    for name in (each.name for each in fields(first)):
        values[name] = _JOINED.get(name, add)(getattr(first, name), getattr(second, name))
    return SpeculativeStats(**values)


def _by_key(first: Mapping[Any, Any], second: Mapping[Any, Any]) -> dict[Any, Any]:
    return {**first, **second, **{key: first[key] + second[key] for key in first.keys() & second}}


def _listed(first: str | None, second: str | None) -> str | None:
    parts = [part for each in (first, second) if each for part in each.split(", ")]
    return ", ".join(dict.fromkeys(parts)) or None


_JOINED: dict[str, Callable[[Any, Any], Any]] = {
    "accepted_histogram": lambda a, b: tuple(map(sum, zip_longest(a, b, fillvalue=0))),
    "per_source": _by_key,
    "budget_histogram": _by_key,
    "engine": _listed,
    "execution": _listed,
    "layers": lambda a, b: b or a,
    "own_code": lambda a, b: tuple(dict.fromkeys(a + b)),
    "fallback_reason": _listed,
    "trace": lambda a, b: a + b if a and b else a or b,
}
"""How fields are joined that are not added up."""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class _Published:
    """The statistics of the calls on one model."""

    def __init__(self) -> None:
        self.latest: SpeculativeStats | None = None
        self.of_thread = threading.local()
        self.totals = Totals()
        self.listeners: dict[object, Callable[[SpeculativeStats], None]] = {}
        self.lock = threading.Lock()


def _published(model: Any) -> _Published:
    return kept(unwrap(model), _Published)


def publish(model: Any, stats: SpeculativeStats | None) -> None:
    """Keep the statistics of the latest call on a model, None after a plain call."""
    published = _published(model)
    published.of_thread.stats = published.latest = stats


def of_this_thread(model: Any) -> SpeculativeStats | None:
    """Return the statistics that this thread published last."""
    return getattr(_published(model).of_thread, "stats", None)


def notify(model: Any, record: SpeculativeStats) -> None:
    """Add a call that has ended to the totals, and call the listeners."""
    published = _published(model)
    with published.lock:
        published.totals = published.totals.plus(record)
        listeners = list(published.listeners.values())
    for listener in listeners:
        try:
            listener(record)
        except Exception as error:  # the text is there, and must not be lost
            message = f"a callback of on_stats raised {type(error).__name__}: {error}"
            with suppress(RuntimeWarning):  # where warnings are errors
                warnings.warn(message, RuntimeWarning, stacklevel=2)


def last_stats(model: Any) -> SpeculativeStats | None:
    """Return the statistics of the latest call on a model, which may be of another thread.

    They are None before the first call and after a plain one, and after `generate_batch` the sum of
    its requests in the order in which they ended. They are there when a streamer gets the end; a
    call that raises earlier leaves those of the call before it. If several threads call a model,
    `output.speculative_stats` (of `return_dict_in_generate=True`) and `on_stats` are of one call.
    """
    return _published(model).latest


def totals(model: Any) -> Totals:
    """Return the sums over all calls on a model that have returned since `reset_totals`."""
    return _published(model).totals


def reset_totals(model: Any) -> None:
    """Begin the sums of `totals` at zero again."""
    published = _published(model)
    with published.lock:
        published.totals = Totals()


def on_stats(model: Any, callback: Callable[[SpeculativeStats], None]) -> Callable[[], None]:
    """Call a function with the statistics of every call that asks for speculation.

    It is called when the text is complete, in the thread of the call, also after speculative calls
    that it makes itself. An exception that it raises becomes a warning. If it refers to the model,
    it keeps the model alive. The function that is returned stops the calls.
    """
    published, key = _published(model), object()
    with published.lock:
        published.listeners[key] = callback

    def stop() -> None:
        with published.lock:
            published.listeners.pop(key, None)

    return stop
