"""What a forward of the target costs by the number of draft nodes, measured while decoding."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque

import numpy as np

SIZES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Node counts per row that are told apart."""

KEPT_SAMPLES = 9
"""Durations kept per size: 7 of them must change before a slower estimate shows, 3 for a faster."""

STALE = 48
"""Steps of other sizes after which a size's durations may be of another time of the machine."""

DEADBAND = 0.05
"""Changes of an estimate that are taken for noise."""

OUT_OF_REACH = 3.0
"""How many times its usual cost a few disturbed measurements may make a size look."""

SLOPE = 0.02
"""Cost of one more node, relative to a plain step, where nothing is known."""


class CostCurve:
    """Seconds of a step by nodes per row, in one setting (rows of the batch, length of the texts).

    Each size keeps its latest durations; a low quantile of them is the estimate, since what
    disturbs a step makes it longer. Sizes never measured lie on lines between those that were, or
    follow the curve of a similar setting, scaled to what was measured.
    """

    def __init__(self, like: CostCurve | None = None) -> None:
        """Start empty, or with the shape of a curve of a similar setting."""
        self._lock = threading.Lock()
        self._samples: dict[int, deque[float]] = {}
        self._seen: dict[int, int] = {}
        self._clock = 0
        self._estimates: dict[int, float] = {}
        self._guesses: dict[int, float] = {}
        if like is not None:
            with like._lock:
                self._guesses = like._known()
        self._line = self._drawn()

    @property
    def greatest_size(self) -> int:
        """The greatest size whose cost is known or guessed, 0 if there is none."""
        return max((*self._estimates, *self._guesses), default=0)

    @property
    def plain_seconds(self) -> float:
        """Estimated seconds of a step without a draft."""
        return self._line[1][0]

    def observe(self, num_nodes: int, seconds: float) -> None:
        """Note how long a step with `num_nodes` draft nodes per row took."""
        size = size_for(num_nodes)
        with self._lock:
            samples = self._samples.setdefault(size, deque(maxlen=KEPT_SAMPLES))
            while len(samples) > 1 and self._is_stale(size):
                samples.popleft()
            samples.append(seconds)
            self._clock += 1
            self._seen[size] = self._clock
            estimate = sorted(samples)[len(samples) // 4]
            known = self._estimates.get(size)
            if known is None or abs(estimate - known) > DEADBAND * known:
                # Readers take no lock: what they iterate over must not change.
                self._estimates = {**self._estimates, size: estimate}
                self._line = self._drawn()

    def num_samples(self, num_nodes: int) -> int:
        """Durations that tell the cost of `num_nodes`, at most `KEPT_SAMPLES`, old ones as one."""
        size = size_for(num_nodes)
        count = len(self._samples.get(size, ()))
        return min(count, 1) if self._is_stale(size) else count

    def _is_stale(self, size: int) -> bool:
        return self._clock - self._seen.get(size, 0) > STALE

    def _known(self) -> dict[int, float]:
        """Seconds by size, measured or else guessed."""
        measured, guesses = self._estimates, self._guesses
        ratios = sorted(measured[n] / guesses[n] for n in measured if n in guesses)
        scale = ratios[len(ratios) // 2] if ratios else 1.0
        return {n: scale * guess for n, guess in guesses.items()} | measured

    def seconds(self, num_nodes: np.ndarray) -> np.ndarray:
        """Estimated seconds of steps with so many nodes per row."""
        sizes, seconds = self._line
        return np.interp(num_nodes, sizes, seconds)

    def seconds_at_best(self, num_nodes: int, hopeful: bool = False) -> float:
        """As `seconds`, if the size were no dearer than its neighbours make it look.

        Between measured sizes that is the straight line, beyond the greatest the cost of that one.
        `hopeful` doubts what was measured even more, unless it puts the size out of reach.
        """
        size = size_for(num_nodes)
        known = self._known()
        others = sorted(n for n in known if n != size)
        if not others:
            return float(self.seconds(np.array([num_nodes]))[0])
        guess = float(np.interp(num_nodes, others, [known[n] for n in others]))
        measured = known.get(size, guess)
        if not hopeful or size not in self._estimates:
            return min(guess, measured)
        unknown = self.plain_seconds * (1.0 + SLOPE * num_nodes)
        return measured if measured > OUT_OF_REACH * unknown else min(guess, measured, unknown)

    def _drawn(self) -> tuple[list[float], list[float]]:
        """Points of the polyline from no nodes to more than any draft has.

        A step without a draft costs no more than one with: where it seems so, it was disturbed.
        """
        known = sorted(self._known().items()) or [(0, 1.0)]
        sizes, seconds = [float(n) for n, _ in known], [s for _, s in known]
        if sizes[0] == 0:
            seconds[0] = min(seconds)
        else:
            sizes.insert(0, 0.0)
            seconds.insert(0, seconds[0] / (1.0 + SLOPE * sizes[1]))
        if len(sizes) > 1:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
        else:
            slope = SLOPE * seconds[0]
        far = sizes[-1] + 1024.0
        return [*sizes, far], [*seconds, seconds[-1] + slope * 1024.0]


class CostModel:
    """The cost curves of one model, shared by all its calls."""

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._curves: OrderedDict[tuple[str, int, str, int], CostCurve] = OrderedDict()

    def curve(
        self, num_rows: int, context_length: int, setting: str = "", mode: str = ""
    ) -> CostCurve:
        """The curve for a batch of `num_rows` texts of about `context_length` tokens.

        Lengths count by powers of two; a new length or mode starts from the nearest known one.

        Args:
            num_rows: Rows of the batch.
            context_length: Tokens of the longest row.
            setting: Whatever else changes the cost of a forward: device, dtype.
            mode: How the target runs its steps, which may change from step to step.
        """
        length = max(context_length, 1).bit_length()
        key = (setting, num_rows, mode, length)
        with self._lock:
            if key not in self._curves:
                known = [k for k in self._curves if k[:2] == key[:2]]
                nearest = min(known, key=lambda k: (k[2] != mode, abs(k[3] - length)), default=None)
                self._curves[key] = CostCurve(None if nearest is None else self._curves[nearest])
            self._curves.move_to_end(key)
            if len(self._curves) > self._capacity:
                self._curves.popitem(last=False)
            return self._curves[key]


def size_for(num_nodes: int) -> int:
    """The smallest of `SIZES` that holds so many nodes."""
    return next((size for size in SIZES if size >= num_nodes), SIZES[-1])
