"""The figures of the drafters' benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from ours import Ours
from replay import Line, Recorded, replay

from lookahead_hf.cli.analysis.replay import Text
from lookahead_hf.drafting.sources.recycling_buckets import NUM_PROBS, PROB_EDGES, SINGLE_START
from lookahead_hf.ngram_pool.matches import LEVELS, NUM_SHARES, NUM_TOTALS

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "drafters"  # so that equal figures are equal files
matplotlib.rcParams["svg.fonttype"] = "none"

from matplotlib import pyplot  # noqa: E402 (the backend is chosen first)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
LEAST_TESTS = 100
"""Rates from fewer tests are not drawn."""


def by_family(lines: list[Line], path: Path) -> None:
    """Plot tokens per step of every drafter, a group of bars per family."""
    families = list(dict.fromkeys(line.family for line in lines))
    drafters = list(dict.fromkeys(line.drafter for line in lines))
    colors = iter(("tab:orange", "tab:blue", "tab:green", "tab:red"))
    figure, axis = pyplot.subplots(figsize=(11, 4.5), layout="constrained")
    for place, name in enumerate(drafters):
        own = [line for line in lines if line.drafter == name]
        at = np.arange(len(families)) + 0.85 * ((place + 0.5) / len(drafters) - 0.5)
        heights = [line.tokens_per_step for line in own]
        is_ours = name.startswith("ours")
        label = name if is_ours else f"{name}: {own[-1].nodes_per_step:.0f} nodes"
        color = next(colors, "tab:purple") if is_ours else str(0.85 - 0.09 * place)
        axis.bar(at, heights, 0.85 / len(drafters), label=label, color=color)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_ylabel("tokens per step")
    axis.set_xticks(range(len(families)), families, rotation=15)
    figure.legend(loc="outside upper center", ncols=3, fontsize="small")
    _save(figure, path)


def for_docs(
    lines: list[Line], texts: list[Text], target: Recorded, new_tokens: int, folder: Path
) -> None:
    """Plot tokens per step by family and by number of nodes, and acceptance by bucket."""
    folder.mkdir(parents=True, exist_ok=True)
    by_family(lines, folder / "drafters.svg")
    contenders = [Ours(size, new_tokens) for size in SIZES]
    means = []
    for contender in contenders:
        outcomes = replay(texts, contender, target)
        steps = sum(outcome.steps for outcome in outcomes)
        means.append(sum(outcome.emitted for outcome in outcomes) / steps)
    by_size(means, lines, folder / "nodes.svg")
    tested = contenders[-1].tested
    assert tested is not None
    by_bucket(tested, folder / "acceptance.svg")


def by_size(means: list[float], lines: list[Line], path: Path) -> None:
    """Plot ours as a curve over the number of nodes, every other drafter as a point."""
    figure, axis = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    axis.plot(SIZES, means, "o-", label="ours")
    for line in lines:
        if line.family == "all" and not line.drafter.startswith("ours"):
            axis.plot(line.nodes_per_step, line.tokens_per_step, "s", color="0.45")
            axis.annotate(
                line.drafter, (line.nodes_per_step, line.tokens_per_step), (5, -9),
                textcoords="offset points", fontsize="x-small",
            )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks(SIZES, [str(size) for size in SIZES])
    axis.set_xlabel("nodes per step (others: their mean)")
    axis.set_ylabel("tokens per step")
    axis.grid(alpha=0.3)
    _save(figure, path)


def by_bucket(tested: np.ndarray, path: Path) -> None:  # [2, buckets]
    """Plot acceptance rates of n-gram buckets by match length, of recycled ones by probability."""
    num_ngram = len(LEVELS) * NUM_SHARES * NUM_TOTALS
    ngram = tested[:, :num_ngram].reshape(2, len(LEVELS), NUM_SHARES, NUM_TOTALS)
    recycled = tested[:, num_ngram:].reshape(2, 3, SINGLE_START // NUM_PROBS, NUM_PROBS)
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 4.2), sharey=True, layout="constrained"
    )
    for total, label in enumerate(("seen once", "seen twice", "seen more often")):
        _curve(left, LEVELS, ngram[:, :, -1, total], f"only continuation, {label}")
    _curve(left, LEVELS, ngram[:, :, :-1].sum((2, 3)), "one of several continuations")
    left.set_xscale("log", base=2)
    left.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    left.set_xlabel("ngram: length of the match")
    left.set_ylabel("acceptance rate")
    edges = np.array([0.0, *PROB_EDGES, 1.0])
    middles = (edges[1:] + edges[:-1]) / 2
    for kind, label in enumerate(("after the same two tokens", "after the same token")):
        for rank in (0, 1):
            text = f"{label}, {'likeliest' if rank == 0 else 'second'}"
            _curve(right, middles, recycled[:, kind, rank], text)
    _curve(right, middles, recycled[:, 2].sum(1), "last logits' other candidates")
    right.set_xlabel("recycling: probability that the target gave when it was remembered")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize="x-small")
    _save(figure, path)


def _curve(axis: Any, at: Any, counts: np.ndarray, label: str) -> None:  # [2, points]
    enough = counts[1] >= LEAST_TESTS
    rates = counts[0, enough] / counts[1, enough]
    axis.plot(np.asarray(at, float)[enough], rates, "o-", markersize=3, label=label)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
