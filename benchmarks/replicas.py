"""Simulates replicas that share a data set or a stream of requests, and prints tables.

A replica decodes `SLOTS` texts together. A step of k texts takes `STEP + ROW * k` seconds, as
measured with SmolLM2-135M on two cores; the number of steps of a text is lognormal. Nothing is
run: what is compared is how work is shared, in units of the time that 64 replicas would take if
all slots were full until the end.
"""

from __future__ import annotations

import argparse
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

SLOTS = 8
STEP, ROW = 0.0127, 0.0015
"""Seconds of a step, and of a text in it."""

MEAN_STEPS = 128
START = 20.0
"""Seconds until a replica that replaces a dead one has loaded and warmed up its model."""

IN_FLIGHT = 2
"""Blocks that Ray Data sends to a worker: the one that runs, and one that waits there."""


def seconds_of(lengths: Sequence[float]) -> float:
    """Return the time in which one replica writes texts of these lengths, in steps."""
    waiting = deque(lengths)
    ends = [waiting.popleft() for _ in range(min(SLOTS, len(waiting)))]
    heapq.heapify(ends)
    steps = seconds = 0.0
    while ends:
        end = ends[0]
        seconds += (end - steps) * (STEP + ROW * len(ends))
        steps = end
        heapq.heappop(ends)
        if waiting:
            heapq.heappush(ends, steps + waiting.popleft())
    return seconds


@dataclass(frozen=True)
class Scenario:
    """What happens to a job.

    Attributes:
        name: What the table calls it.
        spread: Standard deviation of the logarithm of the lengths.
        is_sorted: Whether the data set is sorted by length.
        slow: How many replicas run at half speed.
        dies: Whether a replica dies in the middle of the job.
    """

    name: str
    spread: float = 0.6
    is_sorted: bool = False
    slow: int = 0
    dies: bool = False


SPLITS = {
    "a run of rows each": None,
    "every 64th row each": 0,
    "1,024": 1024,
    "256": 256,
    "64": 64,
    "16": 16,
}
"""How a job is divided: ahead, in one of two ways, or in blocks of so many rows."""

SCENARIOS = (
    Scenario("even", spread=0.3),
    Scenario("mixed"),
    Scenario("long tail", spread=1.2),
    Scenario("sorted", is_sorted=True),
    Scenario("4 slow", slow=4),
    Scenario("1 dies", dies=True),
)


@dataclass
class Outcome:
    """A finished job: when it ended, and until when each replica worked, in ideal times."""

    end: float
    ends: np.ndarray  # [replicas]

    @property
    def cost(self) -> float:
        """Replica time until the last text, if replicas without work leave."""
        return float(self.ends.mean())


@dataclass
class Cluster:
    """Replicas that take blocks in turn, each as soon as fewer than `in_flight` are with it."""

    factors: Sequence[float]
    in_flight: int
    queues: list[deque[float]] = field(init=False)

    def run(self, blocks: Sequence[float], death: float | None = None) -> Outcome:
        """Run blocks, given in seconds at full speed; the first replica dies at `death`."""
        count = len(self.factors)
        left, ends = deque(blocks), np.zeros(count)
        self.queues = [deque() for _ in range(count)]
        events: list[tuple[float, int, str]] = []
        for _ in range(self.in_flight):
            for each in range(min(count, len(left))):
                self.queues[each].append(left.popleft())
        for each in range(count):
            self._start(events, 0.0, each)
        if death is not None:
            heapq.heappush(events, (death, 0, "dies"))
        while events:
            now, each, what = heapq.heappop(events)
            if what == "dies":
                events = [event for event in events if event[1] != 0]
                heapq.heapify(events)
                left.extendleft(reversed(self.queues[0]))
                self.queues[0].clear()
                heapq.heappush(events, (now + START, 0, "starts"))
                continue
            if what == "ends":
                self.queues[each].popleft()
                ends[each] = now
            while left and len(self.queues[each]) < self.in_flight:
                self.queues[each].append(left.popleft())
            self._start(events, now, each)
        return Outcome(float(ends.max()), ends)

    def _start(self, events: list[tuple[float, int, str]], now: float, each: int) -> None:
        if self.queues[each]:
            seconds = self.queues[each][0] * self.factors[each]
            heapq.heappush(events, (now + seconds, each, "ends"))


def job(scenario: Scenario, block: int | None, replicas: int, rows: int, seed: int) -> Outcome:
    """Run a data set that is divided as a value of `SPLITS` says."""
    random = np.random.default_rng(seed)
    mean = np.log(MEAN_STEPS) - scenario.spread**2 / 2
    lengths = np.maximum(1, random.lognormal(mean, scenario.spread, replicas * rows))
    if scenario.is_sorted:
        lengths.sort()
    factors = [2.0 if each < scenario.slow else 1.0 for each in range(replicas)]
    full = (STEP + ROW * SLOTS) / SLOTS
    ideal = float(lengths.sum()) * full / sum(1 / factor for factor in factors)
    if block == 0:
        parts = [lengths[first::replicas] for first in range(replicas)]
    else:
        size = block or rows
        parts = [lengths[first : first + size] for first in range(0, len(lengths), size)]
    blocks = [seconds_of(part) for part in parts]
    cluster = Cluster(factors, IN_FLIGHT if block else 1)
    found = cluster.run(blocks, ideal / 2 if scenario.dies else None)
    return Outcome(found.end / ideal, found.ends / ideal)


def print_jobs(replicas: int, rows: int, seeds: int) -> None:
    """Print how much longer than ideal jobs take, and what they cost."""
    names = " | ".join(scenario.name for scenario in SCENARIOS)
    print(
        f"{replicas} replicas, {replicas * rows:,} rows: time / replica time if idle ones leave\n"
    )
    print(f"| split | {names} |")
    print("|---" * (len(SCENARIOS) + 1) + "|")
    for name, block in SPLITS.items():
        cells = []
        for scenario in SCENARIOS:
            found = [job(scenario, block, replicas, rows, seed) for seed in range(seeds)]
            end, cost = (np.mean([getattr(each, of) for each in found]) for of in ("end", "cost"))
            cells.append(f"{end:.2f} / {cost:.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


Route = Callable[[np.random.Generator, int, Sequence[int]], int]
"""Chooses a replica, given a session and the requests that each replica has."""


def at_random(random: np.random.Generator, session: int, lengths: Sequence[int]) -> int:
    """Any replica."""
    return int(random.integers(len(lengths)))


def of_two(random: np.random.Generator, session: int, lengths: Sequence[int]) -> int:
    """The less busy one of two, as Ray Serve routes without sessions."""
    first, second = random.integers(len(lengths), size=2)
    return int(first if lengths[first] <= lengths[second] else second)


def of_session(random: np.random.Generator, session: int, lengths: Sequence[int]) -> int:
    """The replica of the session."""
    return session % len(lengths)


ROUTES: dict[str, Route] = {"random": at_random, "less busy of two": of_two, "session": of_session}


def serve(route: Route, load: float, replicas: int, sessions: int, requests: int) -> list[float]:
    """Return the mean and the 99th percentile of the requests before a new one, and its wait.

    A replica answers one request at a time; waits are in mean answer times.
    """
    random = np.random.default_rng(0)
    arrivals = np.cumsum(random.exponential(1 / (load * replicas), requests))
    spread = 0.6
    answers = random.lognormal(-(spread**2) / 2, spread, requests)
    free_at = np.zeros(replicas)
    pending: list[tuple[float, int]] = []
    lengths = [0] * replicas
    before, waits = [], []
    for now, answer in zip(arrivals, answers, strict=True):
        while pending and pending[0][0] <= now:
            lengths[heapq.heappop(pending)[1]] -= 1
        each = route(random, int(random.integers(sessions)), lengths)
        before.append(lengths[each])
        start = max(now, free_at[each])
        waits.append(start - now)
        free_at[each] = start + answer
        lengths[each] += 1
        heapq.heappush(pending, (free_at[each], each))
    return [
        float(each) for kind in (before, waits) for each in (np.mean(kind), np.percentile(kind, 99))
    ]


def print_served(replicas: int, requests: int) -> None:
    """Print queue lengths and waits by the way that requests are routed."""
    print("\n| sessions | load | route | requests before, mean / p99 | wait, mean / p99 |")
    print("|---|---|---|---|---|")
    for sessions in (20 * replicas, 2 * replicas):
        for load in (0.5, 0.8):
            for name, route in ROUTES.items():
                before, most, wait, longest = serve(route, load, replicas, sessions, requests)
                queue = f"{before:.1f} / {most:.0f}"
                print(
                    f"| {sessions:,} | {load:.0%} | {name} | {queue} | {wait:.1f} / {longest:.1f} |"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1024, help="rows per replica")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=100_000)
    given = parser.parse_args()
    print_jobs(given.replicas, given.rows, given.seeds)
    print_served(given.replicas, given.requests)
