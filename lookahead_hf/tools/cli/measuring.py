"""Measures plain and speculative calls, and sums the measurements up."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import median_low
from typing import TYPE_CHECKING, Any

from lookahead_hf.tools.cli.screen import CommandError

if TYPE_CHECKING:
    from lookahead_hf.stats import SpeculativeStats


PLAIN, LOOKUP, OURS = "plain", "HF prompt lookup", "speculative"


def systems(batch_size: int = 1) -> dict[str, dict[str, Any]]:
    """Return the systems to compare, each with the arguments that it adds to `generate`."""
    known: dict[str, dict[str, Any]] = {PLAIN: {}}
    if batch_size == 1:  # HF's assisted decoding takes no batches
        known[LOOKUP] = {"prompt_lookup_num_tokens": 10}
    known[OURS] = {"speculative": True}
    return known


@dataclass(frozen=True)
class Batch:
    """Prompts that one call generates from."""

    family: str
    indices: tuple[int, ...]  # of the prompts within their family
    inputs: dict[str, Any]  # input_ids and attention_mask, [rows, columns], and a pad token


@dataclass(frozen=True)
class Call:
    """One timed call of `generate`."""

    seconds: float
    rows: tuple[tuple[int, ...], ...]  # new tokens of each row, up to and with its end token
    forwards: int = 0  # forwards of the model, the prefill's included
    stats: SpeculativeStats | None = None  # of a speculative call

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.rows))

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


@dataclass
class Run:
    """The calls of one batch by one system, one per round."""

    family: str
    system: str
    calls: list[Call] = field(default_factory=list)

    @property
    def call(self) -> Call:
        """The call of median speed: in half precision, rounds may write different texts."""
        speeds = [call.speed for call in self.calls]
        return self.calls[speeds.index(median_low(speeds))]


def measure(
    model: Any,
    batches: Sequence[Batch],
    ways: Mapping[str, dict[str, Any]],
    shared: dict[str, Any],
    rounds: int,
    seed: int = 0,
) -> Iterator[list[Run]]:
    """Run every batch by every system, round after round; yield the runs so far after every batch.

    `ways` are the arguments that each system adds to the `shared` ones of `generate`. `seed` is
    that of the first batch; every further batch has the next number. CommandError if a speculative
    call ran plain `generate`.
    """
    for extra in ways.values():
        timed_call(model, batches[0].inputs | shared | extra, seed)
    runs = [{name: Run(batch.family, name) for name in ways} for batch in batches]
    named = list(ways.items())
    for number in range(rounds):
        for at, batch in enumerate(batches):
            shift = (number + at) % len(named)  # the first system meets colder caches
            for name, extra in named[shift:] + named[:shift]:
                call = timed_call(model, batch.inputs | shared | extra, seed + at)
                reason = call.stats and call.stats.fallback_reason
                if "speculative" in extra and (call.stats is None or reason is not None):
                    raise CommandError(f"The call was not speculated: {reason}")
                runs[at][name].calls.append(call)
            done = runs if number else runs[: at + 1]
            yield [run for by_system in done for run in by_system.values()]


def timed_call(model: Any, arguments: dict[str, Any], seed: int | None = None) -> Call:
    """Run `generate` once and count the model's forwards; the generator goes on without a seed."""
    import torch

    import lookahead_hf

    prompts = {name: arguments[name].to(model.device) for name in ("input_ids", "attention_mask")}
    if seed is not None:
        torch.manual_seed(seed)
    is_ours, forwards = bool(arguments.get("speculative")), 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    # Our calls are counted by their statistics: a hook would change how their steps run.
    with nullcontext() if is_ours else model.register_forward_pre_hook(count):
        start = time.perf_counter()
        output = model.generate(**{**arguments, **prompts})
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    sequences = getattr(output, "sequences", output)
    new = sequences[:, prompts["input_ids"].shape[1] :].tolist()
    end_ids = end_tokens(model)
    stats = lookahead_hf.last_stats(model) if is_ours else None
    if stats is not None:
        forwards = 1 + stats.num_steps
    return Call(seconds, tuple(until_end(row, end_ids) for row in new), forwards, stats)


def until_end(row: list[int], end_ids: frozenset[int]) -> tuple[int, ...]:
    """Return the tokens of a row up to and with its end token."""
    ends = [index for index, token in enumerate(row) if token in end_ids]
    return tuple(row[: ends[0] + 1] if ends else row)


def end_tokens(model: Any) -> frozenset[int]:
    ids = model.generation_config.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())


@dataclass(frozen=True)
class Line:
    """One line of the result: a system on one family of prompts, or on all families."""

    family: str
    system: str
    texts: int
    tokens: int
    tokens_per_second: float
    ratio: float  # to plain; `lowest` and `highest` are those of single calls
    lowest: float
    highest: float
    tokens_per_step: float
    outside_forward: float | None  # share of the time after the prefill
    identical: float  # share of the texts that equal the plain ones


def summarize(runs: list[Run]) -> list[Line]:
    """Return a line per family and system, then a line per system over all families."""
    families = list(dict.fromkeys(run.family for run in runs))
    lines = []
    for family in [*families, "all"]:
        chosen = [run for run in runs if family in (run.family, "all")]
        plain = [run for run in chosen if run.system == PLAIN]
        for system in dict.fromkeys(run.system for run in chosen):
            lines.append(_line(family, [run for run in chosen if run.system == system], plain))
    return lines


def _line(family: str, runs: list[Run], plain: list[Run]) -> Line:
    pairs = [
        pair
        for run, reference in zip(runs, plain, strict=True)
        for pair in zip(run.call.rows, reference.call.rows, strict=True)
    ]
    speed = _tokens_per_second(runs)
    ratios = [run.call.speed / each.call.speed for run, each in zip(runs, plain, strict=True)]
    return Line(
        family=family,
        system=runs[0].system,
        texts=len(pairs),
        tokens=sum(len(text) for text, _ in pairs),
        tokens_per_second=speed,
        ratio=speed / _tokens_per_second(plain),
        lowest=min(ratios),
        highest=max(ratios),
        tokens_per_step=_tokens_per_step(runs),
        outside_forward=_outside_forward(runs),
        identical=sum(text == reference for text, reference in pairs) / len(pairs),
    )


def _tokens_per_second(runs: list[Run]) -> float:
    calls = [run.call for run in runs]
    return sum(call.num_tokens for call in calls) / sum(call.seconds for call in calls)


def _tokens_per_step(runs: list[Run]) -> float:
    """Return (emitted - rows) / row steps; without statistics, forwards count as steps."""
    calls = [run.call for run in runs]
    if found := [call.stats for call in calls if call.stats is not None]:
        emitted = sum(stats.num_emitted - stats.rows for stats in found)
        return _ratio(emitted, sum(stats.row_steps for stats in found))
    if runs[0].system == PLAIN:
        return 1.0
    emitted = sum(call.num_tokens - len(call.rows) for call in calls)
    return _ratio(emitted, sum(call.forwards - 1 for call in calls))


def _outside_forward(runs: list[Run]) -> float | None:
    """Return the share of the time after the prefill that is spent outside forwards."""
    calls = [(call, call.stats) for run in runs for call in run.calls if call.stats is not None]
    if not calls:
        return None
    loop = sum(call.seconds * 1000 - stats.prefill_ms for call, stats in calls)
    return 1 - _ratio(sum(stats.forward_ms for _, stats in calls), loop)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")
