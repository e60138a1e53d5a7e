"""Measured costs of a step of the target by its size."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Collection
from typing import Any

import numpy as np

SIZES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Draft sizes with a measured cost each, in padded blocks."""

FLAT_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of tokens with a measured cost each, in packed blocks. In float32, four tokens take a
fifth longer than three, and the next ones add much less."""

KEPT_SAMPLES = 9
"""Latest durations kept per size."""

DUE_AFTER = 32
"""Steps after which a size measured once is due again; this grows up to `KEPT_SAMPLES` times."""

TRY_EVERY = 16
"""Steps between two tries of sizes that are due."""

SLOPE = 0.02
"""Assumed cost of one more token, relative to a plain step."""


class CostCurve:
    """Seconds of a step by its size, in one setting of rows and text length.

    The size is the draft nodes per row if blocks are padded, and the tokens of all rows if they are
    flat. The estimate is the lower quartile of the latest durations, since disturbances only make
    steps longer, and at most that of a larger size. Unmeasured sizes follow the curve of a similar
    setting, or a line of slope `SLOPE` per row, scaled to the measured sizes around them.
    """

    def __init__(
        self,
        like: CostCurve | None = None,
        num_rows: int = 1,
        sizes: tuple[int, ...] | None = None,
        is_flat: bool = False,
    ) -> None:
        """Start from the curve of a similar setting, if there is one; see `CostModel.curve`."""
        self._is_stepped = sizes is not None
        self.sizes = sizes or (FLAT_SIZES if is_flat else SIZES)
        self._lock = threading.Lock()
        self._samples: dict[int, deque[float]] = {}
        self._counts: dict[int, int] = {}
        self._due: dict[int, int] = {}
        self.num_observed = 0  # steps
        known = np.array(self.sizes)
        self._assumed = 1.0 + SLOPE * num_rows * known if like is None else like.seconds(known)
        self._estimates = self._assumed
        self.greatest_size: int = 0 if like is None else like.greatest_size  # that was measured

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
            self.greatest_size = max(self.greatest_size, size)
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

    def __init__(self, capacity: int = 64) -> None:
        """Keep at most `capacity` curves, those used last."""
        self._capacity = capacity
        self._lock = threading.Lock()
        self._curves: OrderedDict[tuple[Any, ...], CostCurve] = OrderedDict()

    def curve(
        self,
        num_rows: int,
        context_length: int,
        placement: str = "",
        mode: str = "",
        sizes: tuple[int, ...] | None = None,
        is_flat: bool = False,
    ) -> CostCurve:
        """Return the curve for a batch of `num_rows` texts of about `context_length` tokens.

        Lengths count by powers of two; a new length or mode starts from the curve used last. So do
        rows in packed blocks, where a token costs much the same beside any number of rows.

        The placement is whatever else changes the cost of a forward, such as the device; the mode,
        how the runner runs its steps. Drafts may be padded to `sizes`, node counts from 0 on.
        """
        alike = placement, is_flat, None if is_flat else num_rows
        rows = (num_rows - 1).bit_length() if is_flat else num_rows
        key = *alike, rows, mode, max(context_length, 1).bit_length(), sizes
        with self._lock:
            if key not in self._curves:
                others = (
                    self._curves[each] for each in reversed(self._curves) if each[:3] == alike
                )
                slope_rows = 1 if is_flat else num_rows
                self._curves[key] = CostCurve(next(others, None), slope_rows, sizes, is_flat)
            self._curves.move_to_end(key)
            if len(self._curves) > self._capacity:
                self._curves.popitem(last=False)
            return self._curves[key]
