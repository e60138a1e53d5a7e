"""Chooses how many nodes to verify: what brings the most tokens per second, by measured costs."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead_hf.draft import DraftTree, place_in_row
from lookahead_hf.rows import Rows

if TYPE_CHECKING:
    from lookahead_hf.runner.host import Runner

PATIENCE = 0.5
"""Expected tokens per row that a due plain step may give up, per step that it has waited. Short
answers often copy in their very first steps."""

MOST_TOGETHER = 384
"""Most nodes that all rows together are offered; no device verifies more for free. For 32 rows,
trees of 12 nodes take a quarter less time than trees of 16."""

SAVED_SHARE = 0.6
"""Steps a static batch saves, as a share of what it would save if all rows accepted equally.
Measured in batches of 4 and 8: 0.4 to 1.0, lower when few tokens are accepted."""

SPREAD = 0.2  # Relative uncertainty of the steps that rows are expected to need


class Budget:
    """Chooses the number of draft nodes of each row.

    "auto" takes the size n of the greatest E[tokens(n)] / cost(n), from the nodes' calibrated
    probabilities and the measured cost; 0 is one of the sizes. If blocks are padded to the widest
    row, all rows may draft n nodes. If packed, the n likeliest nodes of all rows are taken.

    A static batch takes as long as its slowest row. So a row's tokens count more, the likelier the
    row is to end last; otherwise drafts of the other rows could make a batch slower.
    """

    def __init__(
        self,
        size: str | int,
        max_nodes: int,
        costs: CostModel,
        rows: Rows,
        runner: Runner,
        placement: str = "",
        num_new: int | None = None,
    ) -> None:
        """Budget one call with at most `max_nodes` per row.

        `size` is "auto", or the number of nodes that every step drafts if it can. Texts have at
        most `num_new` tokens; None if other texts take over finished rows.
        """
        self._fixed = None if size == "auto" else int(size)
        together = max(1, MOST_TOGETHER // max(1, rows.num_rows))
        most = together if self._fixed is None else self._fixed
        self.most_nodes = min(most, max_nodes)
        self._costs, self._rows, self._placement = costs, rows, placement
        self._runner, self._is_packed = runner, runner.is_packed
        self._num_new, self._num_steps = num_new, 0
        self._is_first = True
        self._find_curve()

    def choose(self, tree: DraftTree) -> np.ndarray:
        """Return how many nodes of each row's tree, best first, are worth verifying, [rows].

        Drawn nodes always are: a choice among them by their tokens would change the distribution.
        """
        counts: np.ndarray = np.diff(tree.row_offsets)
        taken = self._worthwhile(tree, counts)
        if tree.drawn is None:
            return taken
        row = np.repeat(np.arange(len(counts)), counts)
        return np.maximum(taken, np.bincount(row[tree.drawn >= 0], minlength=len(counts)))

    def _worthwhile(self, tree: DraftTree, counts: np.ndarray) -> np.ndarray:
        if self._fixed is not None:
            return np.minimum(counts, self._fixed)
        if self._is_packed or self._is_first:  # rows may have begun, the prefill settled the mode
            self._find_curve()
        row = np.repeat(np.arange(len(counts)), counts)
        worth = tree.score * self._weights()[row]
        if not self._is_packed:
            place = place_in_row(tree.row_offsets)
            gain = np.bincount(place, weights=worth, minlength=1)
            best = self._best_count(gain, tree.max_nodes)
            taken = np.minimum(counts, best)
        else:
            order = np.argsort(-worth, kind="stable")  # parents stay before their children
            gain = worth[order]
            best = self._best_count(gain, tree.num_nodes)
            taken = np.bincount(row[order[:best]], minlength=len(counts))
        overdue = -1 if self._is_first else self._curve.overdue(self._plain)
        measures_plain = gain[:best].sum() <= PATIENCE * (overdue + 1) * self._rows.live.sum()
        return np.zeros_like(counts) if overdue >= 0 and measures_plain else taken

    def _weights(self) -> np.ndarray:
        emitted, live = self._rows.num_emitted, self._rows.live
        if self._num_new is None or live.sum() < 2:
            return np.ones(len(live))
        # The first steps tell little of a row's pace: 8 of 1.5 tokens are assumed before them.
        pace = (emitted + 12) / (self._num_steps + 8)
        left = np.where(live, (self._num_new - emitted) / pace, -np.inf)  # steps
        most = float(left.max())
        is_last = np.exp((left - most) / (SPREAD * most + 1))
        is_last /= is_last.sum()
        return SAVED_SHARE * live.sum() * is_last

    def _best_count(self, gain: np.ndarray, most: int) -> int:
        """Return the number of nodes, up to `most`, that brings the most tokens per second.

        `gain` is the tokens expected from each further node, [nodes].
        """
        curve, plain, live = self._curve, self._plain, int(self._rows.live.sum())
        most = max(0, min(most, curve.sizes[-1] - plain))
        known = SIZES if self._is_packed else curve.sizes
        nodes = np.array([*(n for n in known if n < most), most])
        tokens = live + np.concatenate([np.zeros(1), gain.cumsum()])[nodes]
        return int(nodes[(tokens / curve.optimistic_seconds(plain + nodes)).argmax()])

    def observe(self, draft: DraftTree, step_seconds: float | None) -> None:
        """Learn from a step and its time without drafting, None if it also did other work."""
        if not self._is_first and step_seconds is not None:
            nodes = draft.num_nodes if self._is_packed else draft.max_nodes
            self._curve.observe(self._plain + nodes, step_seconds)
        self._num_steps += 1
        self._is_first = False  # the first step after a prefill also allocates and warms up
        self._find_curve()

    def _find_curve(self) -> None:
        """Find the cost curve for the present lengths and, if blocks are packed, live rows."""
        rows = self._rows
        length = rows.prompt_columns + int(rows.num_emitted.max(initial=0))
        count = max(1, int(rows.live.sum())) if self._is_packed else rows.num_rows
        steps = self._placement, self._runner.mode, self._runner.sizes, self._is_packed
        self._curve = self._costs.curve(count, length, *steps)
        self._plain = count if self._is_packed else 0  # the size of a step without a draft


SIZES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Draft sizes with a measured cost each, in padded blocks."""

FLAT_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of tokens with a measured cost each, in packed blocks. In float32, four tokens take a
fifth longer than three, and the next ones add much less."""

KEPT_SAMPLES = 9  # Latest durations kept per size

DUE_AFTER = 32
"""Steps after which a size measured once is due again; this grows up to `KEPT_SAMPLES` times."""

TRY_EVERY = 16  # Steps between two tries of sizes that are due
SLOPE = 0.02  # Assumed cost of one more token, relative to a plain step


class CostCurve:
    """Seconds of a step by its size, in one setting of rows and text length.

    The size is the draft nodes per row if blocks are padded, and the tokens of all rows if they are
    packed. The estimate is the lower quartile of the latest durations, since disturbances only make
    steps longer, and at most that of a larger size. Unmeasured sizes follow the curve of a similar
    setting, or a line of slope `SLOPE` per row, scaled to the measured sizes around them.
    """

    def __init__(
        self,
        like: CostCurve | None = None,
        num_rows: int = 1,
        sizes: tuple[int, ...] | None = None,
        is_packed: bool = False,
    ) -> None:
        """Start from the curve of a similar setting, if there is one; see `CostModel.curve`."""
        self._is_stepped = sizes is not None
        self.sizes = sizes or (FLAT_SIZES if is_packed else SIZES)
        self._lock = threading.Lock()
        self._samples: dict[int, deque[float]] = {}
        self._counts: dict[int, int] = {}
        self._due: dict[int, int] = {}
        self.num_observed = 0  # steps
        known = np.array(self.sizes)
        self._assumed = 1.0 + SLOPE * num_rows * known if like is None else like.seconds(known)
        self._estimates = self._assumed

    def observe(self, size: int, seconds: float) -> None:
        exact, size = size, self.size_for(size)
        if exact != size:  # what it would have taken with the size that it counts for
            of_exact, of_size = self.seconds(np.array([exact, size])).tolist()
            seconds *= of_size / of_exact
        with self._lock:
            samples = self._samples.setdefault(size, deque(maxlen=KEPT_SAMPLES))
            if samples and self.is_due(size):  # the machine may have changed since then
                known = _low_quantile(samples)
                samples.clear()
                samples.append(known)
            samples.append(seconds)
            self.num_observed += 1
            self._counts[size] = count = min(self._counts.get(size, 0) + 1, KEPT_SAMPLES)
            self._due[size] = self.num_observed + DUE_AFTER * count
            known_sizes = sorted(self._samples)
            factors = [
                _low_quantile(self._samples[each]) / self._assumed[self.sizes.index(each)]
                for each in known_sizes
            ]
            estimates = self._assumed * np.interp(self.sizes, known_sizes, factors)
            self._estimates = np.minimum.accumulate(estimates[::-1])[::-1]

    def num_samples(self, size: int) -> int:
        """Return how often a size was measured, at most `KEPT_SAMPLES`."""
        return self._counts.get(self.size_for(size), 0)

    def is_due(self, size: int) -> bool:
        """Return whether a size was never measured, or too long ago."""
        return self.overdue(size) >= 0

    def overdue(self, size: int) -> int:
        """Return how many steps ago a size was due; below 0 if it is not due yet."""
        return self.num_observed - self._due.get(self.size_for(size), 0)

    def seconds(self, sizes: np.ndarray) -> np.ndarray:
        if self._is_stepped:  # what lies between two sizes is padded to the larger one
            places = np.searchsorted(self.sizes, sizes).clip(max=len(self.sizes) - 1)
            return np.asarray(self._estimates[places])
        return np.interp(sizes, self.sizes, self._estimates)

    def optimistic_seconds(self, sizes: np.ndarray) -> np.ndarray:
        """Estimate the seconds of steps of these sizes, the first a plain step.

        Every `TRY_EVERY` steps, due sizes are assumed to cost the geometric mean of their estimate
        and of a plain step. So they are tried unless they seem far too dear.
        """
        seconds = self.seconds(sizes)
        if self.num_observed % TRY_EVERY != TRY_EVERY - 1:
            return seconds
        due = [self.is_due(size) for size in sizes.tolist()]
        return np.where(due, np.minimum(seconds, (seconds * seconds[0]) ** 0.5), seconds)

    def size_for(self, size: int) -> int:
        """Return the smallest of `sizes` that is at least `size`, or the greatest."""
        return next((each for each in self.sizes if each >= size), self.sizes[-1])


def _low_quantile(samples: Collection[float]) -> float:
    return sorted(samples)[len(samples) // 4]


class CostModel:
    """The cost curves of one model, shared by all its calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._curves: OrderedDict[tuple[Any, ...], CostCurve] = OrderedDict()

    def curve(
        self,
        num_rows: int,
        context_length: int,
        placement: str = "",
        mode: str = "",
        sizes: tuple[int, ...] | None = None,
        is_packed: bool = False,
    ) -> CostCurve:
        """Return the curve for a batch of `num_rows` texts of about `context_length` tokens.

        Lengths count by powers of two; a new length or mode starts from the curve used last. So do
        rows in packed blocks, where a token costs much the same beside any number of rows.

        The placement is whatever else changes the cost of a forward, such as the device; the mode,
        how the runner runs its steps. Drafts may be padded to `sizes`, node counts from 0 on.
        """
        alike = placement, is_packed, None if is_packed else num_rows
        rows = (num_rows - 1).bit_length() if is_packed else num_rows
        key = *alike, rows, mode, max(context_length, 1).bit_length(), sizes
        with self._lock:
            if key not in self._curves:
                others = (
                    self._curves[each] for each in reversed(self._curves) if each[:3] == alike
                )
                slope_rows = 1 if is_packed else num_rows
                self._curves[key] = CostCurve(next(others, None), slope_rows, sizes, is_packed)
            self._curves.move_to_end(key)
            return self._curves[key]
