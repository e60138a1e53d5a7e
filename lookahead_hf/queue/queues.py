"""The queues of a run: waiting requests, and results with their handlers."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

from lookahead_hf.model.compat.batching import GenerationOutput, OutputRouter, RequestState, lock_of
from lookahead_hf.queue.request import Job, own_objects

_logger = logging.getLogger(__name__)


def is_text_of(request_id: str, result_id: str) -> bool:
    """Return whether a result is of a request or of one of its further texts."""
    return result_id == request_id or str(result_id).startswith(f"{request_id}__child#")


@dataclass(eq=False)
class Waiting:
    """A waiting request.

    Attributes:
        first: The number of its first text.
        objects: See `own_objects`.
        cancelled: Ids of its texts that were cancelled meanwhile.
    """

    state: RequestState
    first: int
    objects: frozenset[int]
    cancelled: set[str] = field(default_factory=set)


class RequestQueue(queue.Queue[Any]):
    """Numbers the texts of requests in the order in which these are added.

    Attributes:
        num_texts: Texts of all requests that were added, cancelled ones included.
    """

    num_texts = 0

    def __init__(
        self, maxsize: int, is_emptied: Callable[[], bool], has_ended: Callable[[], bool]
    ) -> None:
        """Prepare an empty queue for at most `maxsize` requests, 0 for any number.

        `is_emptied` returns whether a run takes requests, `has_ended` whether the run is over.
        """
        super().__init__(maxsize)
        self._is_emptied, self._has_ended = is_emptied, has_ended

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add a request, and wait for room as long as a run goes on, whatever the timeout.

        transformers' manager empties its queue before every step, ours as rows become free.
        """
        waiting = Waiting(item, 0, own_objects(item))
        while True:
            try:
                return super().put(waiting, block, timeout)
            except queue.Full:
                if not block or not self._is_emptied():
                    raise

    def _put(self, waiting: Waiting) -> None:
        if self._has_ended():  # while the caller waited for room
            raise queue.Full
        waiting.first = self.num_texts
        super()._put(waiting)
        self.num_texts += 1 + waiting.state.num_children

    def take(self, in_use: Set[int]) -> Waiting | None:
        """Return the first request none of whose objects is in use, None if there is none.

        Requests that share an object stay in order.
        """
        awaited = set(in_use)
        with self.mutex:
            for request in self.queue:
                if request.objects.isdisjoint(awaited):
                    self.queue.remove(request)
                    self.not_full.notify()
                    return request
                awaited |= request.objects
        return None

    def cancel(self, request_id: str) -> int:
        """Drop requests by their id, or one text by the id of its result; return `num_texts`."""
        with self.mutex:
            kept = [each for each in self.queue if each.state.request_id != request_id]
            for each in kept:
                if is_text_of(each.state.request_id, request_id):
                    each.cancelled.add(request_id)
            self.not_full.notify(len(self.queue) - len(kept))
            self.queue.clear()
            self.queue.extend(kept)
            return self.num_texts


class Router(OutputRouter):
    """Delivers outputs, except those of cancelled texts."""

    def __init__(self) -> None:
        super().__init__()
        self._cancelled: dict[str, int] = {}

    def deliver(self, output: GenerationOutput, job: Job | None = None) -> None:
        """Deliver an output; if the event loop of its handler was closed, cancel its text.

        `job` is the text of the output, None if the text was not begun.
        """
        name = output.request_id
        with lock_of(self):
            if job is not None and job.is_among(self._cancelled):
                return
            if name not in self.result_handlers:
                self.output_queue.put(output)
                return
            hear, loop = self.result_handlers[name]
        try:
            loop.call_soon_threadsafe(hear, output)
        except RuntimeError as error:
            with lock_of(self):
                self.result_handlers.pop(name, None)
                if job is not None:
                    self._cancelled[name] = job.index + 1
            _logger.warning("nobody takes the text of %r: %s", name, error)

    def hear(self, request_id: str, callback: Callable[..., Any]) -> None:
        """Let the running event loop call a function with each output of a request."""
        handlers = self.result_handlers

        def hear(output: GenerationOutput) -> None:
            if handlers.get(request_id) is not entry:
                return
            callback(output)
            with lock_of(self):
                if output.is_finished() and handlers.get(request_id) is entry:
                    del handlers[request_id]

        entry = hear, asyncio.get_running_loop()
        with lock_of(self):
            handlers[request_id] = entry

    def cancel(self, request_id: str, drop: Callable[[str], int]) -> None:
        """Stop delivering output for a request or one of its texts.

        `drop` removes what waits from the queue and returns how many texts were ever added.
        """
        with lock_of(self), self.output_queue.mutex:
            self._cancelled[request_id] = drop(request_id)
            for name in [each for each in self.result_handlers if is_text_of(request_id, each)]:
                del self.result_handlers[name]
            outputs = self.output_queue.queue
            kept = [each for each in outputs if not is_text_of(request_id, each.request_id)]
            outputs.clear()
            outputs.extend(kept)

    def take_cancelled(self) -> dict[str, int]:
        """Return the ids that were cancelled since the last time, for `Job.is_among`."""
        with lock_of(self):
            found, self._cancelled = self._cancelled, {}
        return found
