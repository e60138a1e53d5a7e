"""Add up what the end-to-end benchmark measured; print, store and plot it."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common

PLAIN = "plain"


@dataclass
class Run:
    """What the rounds of one batch by one system gave."""

    family: str
    system: str
    calls: list[common.Call] = field(default_factory=list)
    stats: list[dict[str, Any]] = field(default_factory=list)  # ours only, one per round

    @property
    def seconds(self) -> float:
        return statistics.median(call.seconds for call in self.calls)

    @property
    def texts(self) -> tuple[tuple[int, ...], ...]:
        return self.calls[-1].rows


@dataclass(frozen=True)
class Line:
    """One line of the result: a system on a family, or on all of them."""

    family: str
    system: str
    texts: int
    tokens: int
    tokens_per_second: float
    ratio: float
    tokens_per_step: float
    outside_forward: float | None  # share of the time after the prefill
    identical: float  # share of the texts that are plain's


def summarize(runs: list[Run]) -> list[Line]:
    """A line per family and system, then the same over all families."""
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
        for pair in zip(run.texts, reference.texts, strict=True)
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
    return sum(run.calls[-1].num_tokens for run in runs) / sum(run.seconds for run in runs)


def _tokens_per_step(runs: list[Run]) -> float:
    """(emitted - rows) / row steps; systems without statistics have their forwards counted."""
    if runs[0].stats:
        last = [run.stats[-1] for run in runs]
        emitted = sum(stats["num_emitted"] - stats["rows"] for stats in last)
        return _ratio(emitted, sum(stats["row_steps"] for stats in last))
    if runs[0].system == PLAIN:
        return 1.0
    emitted = sum(run.calls[-1].num_tokens - len(run.texts) for run in runs)
    return _ratio(emitted, sum(run.calls[-1].forwards - 1 for run in runs))


def _outside_forward(runs: list[Run]) -> float | None:
    """Share of the wall time after the prefill that is not inside a forward of the target."""
    if not runs[0].stats:
        return None
    loop = inside = 0.0
    for run in runs:
        for call, stats in zip(run.calls, run.stats, strict=True):
            loop += call.seconds * 1000 - stats["prefill_ms"]
            inside += stats["forward_ms"]
    return 1 - _ratio(inside, loop)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")


def print_lines(lines: list[Line]) -> None:
    """The result as a Markdown table."""
    print("| family | system | tokens/s | ratio | tokens per step | outside forward | identical |")
    print("|---|---|---|---|---|---|---|")
    for line in lines:
        outside = "" if line.outside_forward is None else f"{line.outside_forward:.1%}"
        print(
            f"| {line.family} | {line.system} | {line.tokens_per_second:.1f} | {line.ratio:.2f} "
            f"| {line.tokens_per_step:.2f} | {outside} | {line.identical:.0%} of {line.texts} |"
        )


def plot(lines: list[Line], path: Path) -> None:
    """Speed against plain and tokens per step, by family."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    families = list(dict.fromkeys(line.family for line in lines))
    names = [name for name in dict.fromkeys(line.system for line in lines) if name != PLAIN]
    figure, axes = pyplot.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
    for axis, (attribute, label) in zip(
        axes, [("ratio", "speed (plain = 1)"), ("tokens_per_step", "tokens per step")], strict=True
    ):
        for place, name in enumerate(names):
            values = [getattr(line, attribute) for line in lines if line.system == name]
            at = [index + 0.8 * (place + 0.5) / len(names) - 0.4 for index in range(len(families))]
            axis.bar(at, values, 0.8 / len(names), label=name)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_ylabel(label)
    names_and_bars = axes[0].get_legend_handles_labels()
    figure.legend(*names_and_bars, loc="outside upper center", ncols=len(names))
    axes[1].set_xticks(range(len(families)), families, rotation=20)
    figure.savefig(path)


def store(path: Path, about: dict[str, Any], runs: list[Run]) -> None:
    """Write the lines, every call's seconds and the latest statistics as JSON."""
    calls = [
        {
            "family": run.family,
            "system": run.system,
            "seconds": [call.seconds for call in run.calls],
            "stats": run.stats[-1] if run.stats else None,
        }
        for run in runs
    ]
    content = {"about": about, "lines": [vars(line) for line in summarize(runs)], "calls": calls}
    path.write_text(json.dumps(content, indent=1) + "\n")
