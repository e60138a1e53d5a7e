"""Sums up timed calls: tokens per second and per step, and the share of texts equal to the plain
ones."""

from __future__ import annotations

from dataclasses import dataclass

from lookahead_hf.cli.measuring import PLAIN, Run


@dataclass(frozen=True)
class Line:
    """One line of the result: a system on one family of prompts, or on all families."""

    family: str
    system: str
    texts: int
    tokens: int
    tokens_per_second: float
    ratio: float
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
    return Line(
        family=family,
        system=runs[0].system,
        texts=len(pairs),
        tokens=sum(len(text) for text, _ in pairs),
        tokens_per_second=speed,
        ratio=speed / _tokens_per_second(plain),
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
