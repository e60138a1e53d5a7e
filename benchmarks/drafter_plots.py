"""The figures of the drafters' benchmark."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import bars
import matplotlib
import numpy as np
import svg
from call_replay import Text
from ours import Ours
from replay import Line, Recorded, replay

from lookahead_hf.drafting.sources._recycling_numba import NUM_PROBS, PROB_EDGES, SINGLE_START
from lookahead_hf.ngram_pool.matches import LEVELS, NUM_SHARES, NUM_TOTALS

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "drafters"  # so that equal figures are equal files
matplotlib.rcParams["svg.fonttype"] = "none"

from matplotlib import pyplot  # noqa: E402 (the backend is chosen first)

COLOURS = ("#8b949e", "#d29922", "#3fb950", "#2f81f7")
"""They stand out on white and on black; the last is ours."""
LEFT, WIDE, HIGH = 60, 560, 260
"""Pixels of the curve's picture."""
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
LEAST_TESTS = 100
"""Rates from fewer tests are not drawn."""


def by_family(lines: list[Line], path: Path) -> None:
    """Draw tokens per step of `chosen`, a group of bars per family."""
    names = chosen(lines)
    groups: dict[str, list[bars.Bar]] = {}
    for line in lines:
        if line.drafter in names:
            is_ours = line.drafter.startswith("ours")
            label = f"{line.tokens_per_step:.2f}" if is_ours else ""
            bar = names[line.drafter], line.tokens_per_step, label
            groups.setdefault(line.family, []).append(bar)
    colours = dict(zip(names.values(), COLOURS, strict=False))
    path.write_text(bars.grouped(groups, colours, "tokens per step by family"))


def chosen(lines: list[Line]) -> dict[str, str]:
    """The drafters of a picture and their labels: the first, the two best others, our largest."""
    over_all = [line for line in lines if line.family == "all"]
    first, *others = [line for line in over_all if not line.drafter.startswith("ours")]
    best = sorted(others, key=lambda line: -line.tokens_per_step)[:2]
    ours = [line for line in over_all if line.drafter.startswith("ours")]
    largest = max((line for line in ours if "kept" not in line.drafter), key=_size)
    drawn = [first, *reversed(best), largest]
    labels = [*(line.drafter for line in drawn[:-1]), "lookahead_hf"]
    return {
        line.drafter: f"{label}: {line.nodes_per_step:.0f} nodes"
        for line, label in zip(drawn, labels, strict=True)
    }


def _size(line: Line) -> float:
    return line.nodes_per_step


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
    """Draw ours as a curve over the number of nodes, the others of `chosen` as points."""
    *others, _ = chosen(lines)
    points = [line for line in lines if line.family == "all" and line.drafter in others]
    top = max([*means, *(line.tokens_per_step for line in points)])
    bottom = math.floor(5 * min([*means, *(line.tokens_per_step for line in points)])) / 5

    def place(nodes: float, tokens: float) -> tuple[float, float]:
        across = math.log2(nodes) / math.log2(SIZES[-1])
        return LEFT + WIDE * across, 20 + HIGH * (top - tokens) / (top - bottom)

    end = LEFT + WIDE
    parts = []
    for step in range(round(5 * bottom), math.floor(5 * top) + 1):
        _, y = place(1, step / 5)
        parts.append(svg.line([(LEFT - 4, y), (LEFT + 4, y)], "tick"))
        parts.append(svg.text(LEFT - 8 - 3 * svg.CHARACTER, y + 4, f"{step / 5:.1f}", "dim"))
    curve = [place(*each) for each in zip(SIZES, means, strict=True)]
    parts.append(svg.line(curve, "ours"))
    for size, (x, y) in zip(SIZES, curve, strict=True):
        parts.append(svg.box(x - 3, y - 3, 6, 6, "ours"))
        parts.append(svg.text(x - svg.CHARACTER * len(str(size)) / 2, HIGH + 42, str(size), "dim"))
    x, y = curve[len(curve) // 2]
    parts.append(svg.text(x - 14 * svg.CHARACTER, y - 8, "lookahead_hf", "ours"))
    for line in points:
        x, y = place(line.nodes_per_step, line.tokens_per_step)
        label = f"{line.drafter} {line.tokens_per_step:.2f}"
        parts.append(svg.box(x - 3, y - 3, 6, 6, "other"))
        fits = x + 10 + svg.CHARACTER * len(label) < end + 20
        parts.append(svg.text(x + 10 if fits else end - svg.CHARACTER * len(label), y + 18, label))
    parts.append(svg.text(LEFT, HIGH + 62, "draft nodes per step (others: their mean)", "dim"))
    parts.append(svg.text(8, 12, "tokens per step", "dim"))
    colours = {"ours": COLOURS[-1], "other": COLOURS[0], "tick": COLOURS[0]}
    title = "tokens per step by number of draft nodes"
    path.write_text(svg.document(end + 30, HIGH + 72, title, "".join(parts), colours, bars.INK))


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
