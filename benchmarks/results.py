"""Print, store and plot what the end-to-end benchmark measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lookahead_hf.cli.measuring import PLAIN, Run
from lookahead_hf.cli.summary import Line, summarize


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
    """Write the lines, every call's seconds and the median round's statistics as JSON."""
    calls = [
        {
            "family": run.family,
            "system": run.system,
            "seconds": [call.seconds for call in run.calls],
            "tokens": [call.num_tokens for call in run.calls],
            "stats": run.stats[run.middle] if run.stats else None,
        }
        for run in runs
    ]
    content = {"about": about, "lines": [vars(line) for line in summarize(runs)], "calls": calls}
    path.write_text(json.dumps(content, indent=1) + "\n")
