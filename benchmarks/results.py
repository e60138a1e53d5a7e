"""Check, print and store what the end-to-end benchmark measured."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lookahead_hf.tools.cli.measuring import (
    PLAIN,
    Batch,
    Divergence,
    Line,
    Run,
    describe,
    find_divergences,
    summarize,
)

Divergences = dict[tuple[str, str], list[Divergence | None]]
"""How every text parts from plain's, by family and system; None is an identical text."""


def check_texts(
    model: Any, batches: Sequence[Batch], runs: Sequence[Run], shared: dict[str, Any]
) -> Divergences:
    """Compare the speculative texts of all rounds with plain's.

    Args:
        model: An enabled model.
        batches: What was measured, the first of them at least.
        runs: What `measure` yielded: all systems of the first batch, then of the second.
        shared: The arguments that all systems passed to `generate`.
    """
    found: Divergences = defaultdict(list)
    num_systems = len({run.system for run in runs})
    for seed, batch in enumerate(batches[: len(runs) // max(1, num_systems)]):
        chosen = runs[seed * num_systems : (seed + 1) * num_systems]
        (plain,) = (run.call.rows for run in chosen if run.system == PLAIN)
        ours = [(run.system, call.rows) for run in chosen for call in run.calls if call.stats]
        inputs = {name: tensor.to(model.device) for name, tensor in batch.inputs.items()}
        texts = [rows for _, rows in ours]
        divergences = find_divergences(model, {**inputs, **shared}, plain, texts, seed)
        for (system, _), rows in zip(ours, divergences, strict=True):
            for family in (batch.family, "all"):
                found[family, system] += rows
    return found


def are_near_ties(divergences: Divergences) -> bool:
    """Whether rounding explains every difference."""
    return all(each is None or each.is_near_tie for rows in divergences.values() for each in rows)


def print_lines(lines: list[Line], divergences: Divergences | None = None) -> None:
    """The result as a Markdown table."""
    print(
        "| family | system | tokens/s | ratio | tokens per step | outside forward | identical "
        "| texts of all rounds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for line in lines:
        outside = "" if line.outside_forward is None else f"{line.outside_forward:.1%}"
        rows = (divergences or {}).get((line.family, line.system))
        print(
            f"| {line.family} | {line.system} | {line.tokens_per_second:.1f} | {line.ratio:.2f} "
            f"| {line.tokens_per_step:.2f} | {outside} | {line.identical:.0%} of {line.texts} "
            f"| {describe(rows) if rows else ''} |"
        )


def store(path: Path, about: dict[str, Any], runs: list[Run]) -> None:
    """Write the lines, every call's seconds and the median round's statistics as JSON."""
    calls = [
        {
            "family": run.family,
            "system": run.system,
            "seconds": [call.seconds for call in run.calls],
            "tokens": [call.num_tokens for call in run.calls],
            "stats": run.call.stats and run.call.stats.to_dict(),
        }
        for run in runs
    ]
    content = {"about": about, "lines": [vars(line) for line in summarize(runs)], "calls": calls}
    path.write_text(json.dumps(content, indent=1) + "\n")
