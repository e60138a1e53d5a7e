"""The requests of a run of continuous batching: they are added, taken, cancelled and delivered."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.logging import tqdm

from lookahead_hf import stats
from lookahead_hf.model.compat.batching import GenerationOutput, RequestState, RequestStatus
from lookahead_hf.queue.request import (
    QueuedRequest,
    RequestBuilder,
    own_objects,
    request_seed,
    text_ids,
)
from lookahead_hf.stats import SpeculativeStats

EVERY_SECONDS = 0.2
"""Least time between two updates of the numbers beside the bar."""


class Progress:
    """Shows finished requests, tokens per second, live rows and tokens per step."""

    def __init__(self, num_requests: int | None) -> None:
        """`num_requests`: the total, None if it is not known."""
        self._bar = tqdm(total=num_requests, unit="request", disable=None)  # a terminal alone
        self._begin = self._shown = time.perf_counter()
        self._tokens = self._emitted = self._steps = 0

    def emitted(self, num_tokens: int) -> None:
        """Count new tokens."""
        self._tokens += num_tokens

    def show(self, num_live: int) -> None:
        """Update the numbers beside the bar, at most every `EVERY_SECONDS`."""
        now = time.perf_counter()
        if now - self._shown < EVERY_SECONDS:
            return
        self._shown = now
        shown = f"{self._tokens / (now - self._begin):.0f} tokens/s, {num_live} live"
        if self._steps:
            shown += f", {self._emitted / self._steps:.2f} tokens per step"
        self._bar.set_postfix_str(shown)

    def finished(self, stats: SpeculativeStats | None) -> None:
        """Count a finished request, with its statistics unless it failed."""
        if stats is not None:
            self._emitted += stats.num_emitted - stats.rows
            self._steps += stats.row_steps
        self._bar.update()

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()


def is_text_of(request_id: str, result_id: str) -> bool:
    """Return whether a result is of a request or of one of its further texts."""
    return result_id == request_id or str(result_id).startswith(f"{request_id}__child#")


@dataclass(eq=False)
class Engine:
    """The requests of a run: those that wait, and what becomes of the others.

    `session.decode` decodes them together. Every text is the one that `generate` writes for its
    prompt alone; see `request_seed` for samples. Threads may add and cancel requests meanwhile.

    Attributes:
        builder: Turns requests into calls of `generate`; it has checked the model.
        max_slots: Most texts that are decoded together.
        max_batch_tokens: Most tokens of a step, None for any number.
        seed_of: Returns the seed of a text by its number.
        hand_out: Takes an output; returns whether anybody hears of its text.
        stops: Returns whether to give up the requests in progress.
        pauses: Waits while the run is paused; returns whether it was.
        is_call: Whether `last_stats` is the sum of all requests, since one call made them.
        progress: A progress bar, or None.
        waiting: Texts that have not begun.
        changed: Held while requests and outputs change hands, and notified of it.
    """

    builder: RequestBuilder
    max_slots: int
    max_batch_tokens: int | None
    seed_of: Callable[[int], int]
    hand_out: Callable[[GenerationOutput], bool] = lambda output: True
    stops: Callable[[], bool] = lambda: False
    pauses: Callable[[], bool] = lambda: False
    is_call: bool = False
    progress: Progress | None = None
    waiting: deque[QueuedRequest] = field(default_factory=deque)
    changed: threading.Condition = field(default_factory=threading.Condition)
    _num_texts: int = 0
    _cancelled: dict[str, int] = field(default_factory=dict)
    _sum: SpeculativeStats | None = None

    @property
    def model(self) -> Any:
        """The model."""
        return self.builder.model

    def add(self, state: RequestState, wait: Callable[[], object] = lambda: None) -> None:
        """Add the texts of a request, which are numbered in this order; its own comes last.

        Each gets copies of the request's processors and criteria. `wait` waits until there is room.
        """
        given, ids = state.logit_processor_kwargs, text_ids(state)
        own = given.pop("seed", None)
        states = [*map(state.fork, ids[:-1]), state]
        with self.changed:
            wait()
            for place, each in enumerate(states):
                index, each.num_children = self._num_texts + place, 0
                seed = self.seed_of(index) if own is None else own
                if own is not None and each is not state:
                    seed = request_seed(own, 1 + place)
                names = frozenset({each.request_id, state.request_id})
                job = QueuedRequest(each, index, seed, names, own_objects(each))
                self.waiting.append(job)
            self._num_texts += len(states)
            self.changed.notify_all()

    def cancel(self, name: str) -> None:
        """Cancel requests by their id, or one text by the id of its result.

        Nothing more is handed out of the texts that were added until now.
        """
        with self.changed:
            self._cancelled[name] = self._num_texts
            self.waiting = deque(job for job in self.waiting if name not in job.names)
            self.changed.notify_all()

    def cancelled(self) -> Mapping[str, int]:
        """Return the ids that were cancelled since the last time, for `QueuedRequest.is_among`."""
        with self.changed:
            found, self._cancelled = self._cancelled, {}
        return found

    def take(self, in_use: Set[int]) -> QueuedRequest | None:
        """Return the first waiting text none of whose objects is in use, None if there is none.

        Texts that share an object stay in order.
        """
        awaited = set(in_use)
        with self.changed:
            for job in self.waiting:
                if job.objects.isdisjoint(awaited):
                    self.waiting.remove(job)
                    self.changed.notify_all()
                    return job
                awaited |= job.objects
        return None

    def deliver(self, job: QueuedRequest, record: SpeculativeStats | None = None) -> None:
        """Hand out the output of a text so far, with its statistics at the end."""
        output = job.output(record)
        if record is not None:
            if self.is_call:
                self._sum = record if self._sum is None else stats.joined(self._sum, record)
            stats.publish(self.model, self._sum or record)
            stats.notify(self.model, record)
        if self.progress is not None and output.is_finished():
            self.progress.finished(record)
        with self.changed:
            if job.is_among(self._cancelled):
                return
            if not self.hand_out(output):
                self._cancelled[output.request_id] = job.index + 1
            self.changed.notify_all()

    def fail_waiting(self, error: BaseException) -> None:
        """Fail all texts that have not begun."""
        with self.changed:
            while self.waiting:
                job = self.waiting.popleft()
                job.state.status, job.state.error = RequestStatus.FAILED, str(error)
                self.deliver(job)
