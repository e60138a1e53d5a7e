"""The queues of a run: requests that wait, and what hears of their results."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

from lookahead_hf.batching.request import own_objects
from lookahead_hf.compat.batching import GenerationOutput, OutputRouter, RequestState

_logger = logging.getLogger(__name__)


def is_text_of(request_id: str, result_id: str) -> bool:
    """Return whether a result is that of a request, or of one of its further texts."""
    return result_id == request_id or result_id.startswith(f"{request_id}__child#")


@dataclass(eq=False)
class Waiting:
    """A request that waits.

    Attributes:
        state: What transformers keeps of a request.
        first: Number of its first text.
        objects: What it brought that may keep something of its text, see `own_objects`.
        cancelled: The ids of its texts that were cancelled meanwhile.
    """

    state: RequestState
    first: int
    objects: frozenset[int]
    cancelled: set[str] = field(default_factory=set)


class RequestQueue(queue.Queue[Any]):
    """Takes requests, and returns each as `Waiting`, with the number of its first text.

    Attributes:
        num_texts: The texts of all requests that were added to a run, cancelled ones included.
    """

    num_texts = 0

    def __init__(
        self, maxsize: int, is_emptied: Callable[[], bool], has_ended: Callable[[], bool]
    ) -> None:
        """Prepare an empty queue.

        Args:
            maxsize: Most requests that wait, 0 for any number.
            is_emptied: Asked whether a run takes requests, so that there will be room.
            has_ended: Asked whether the run has ended, so that nobody takes requests any more.
        """
        super().__init__(maxsize)
        self._is_emptied, self._has_ended = is_emptied, has_ended

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add a request, and wait for room as long as a run goes on, whatever the timeout.

        transformers' manager takes all that waits before every step, ours what has a row.
        """
        while True:
            try:
                return super().put(item, block, timeout)
            except queue.Full:
                if not block or not self._is_emptied():
                    raise

    def _put(self, state: RequestState) -> None:
        if self._has_ended():  # while the caller waited for room
            raise queue.Full
        super()._put(Waiting(state, self.num_texts, own_objects(state)))
        self.num_texts += 1 + state.num_children

    def take(self, in_use: Set[int]) -> Waiting | None:
        """Return the first request that brings no object in use, None if there is none.

        Every object sees its texts in the order in which their requests were added.
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

    def cancel(self, request_id: str) -> None:
        """Drop the requests with an id, or one text of a request by the id of its result."""
        with self.mutex:
            kept = [each for each in self.queue if each.state.request_id != request_id]
            for each in kept:
                if is_text_of(each.state.request_id, request_id):
                    each.cancelled.add(request_id)
            self.not_full.notify(len(self.queue) - len(kept))
            self.queue.clear()
            self.queue.extend(kept)


class Router(OutputRouter):
    """Passes outputs on, also when nobody hears of them any more."""

    def __init__(self, cancel: Callable[[str], None]) -> None:
        """`cancel`: called with the id of a request whose text nobody takes."""
        super().__init__()
        self._cancel = cancel

    def deliver(self, output: GenerationOutput) -> None:
        """Pass an output on; if the event loop of its handler was closed, cancel its request."""
        name = output.request_id
        try:
            super().deliver(output)
        except RuntimeError as error:
            with self._lock:
                self.result_handlers.pop(name, None)
            self._cancel(name)
            _logger.warning("nobody takes the text of %r: %s", name, error)

    def silence(self, request_id: str) -> None:
        """Let the handlers of a request's texts hear nothing more."""
        with self._lock:
            for name, (_, loop) in self.result_handlers.items():
                if is_text_of(request_id, name):
                    self.result_handlers[name] = _ignore, loop

    def forget(self, request_ids: Set[str]) -> None:
        """Forget the handlers that were silenced for these requests, which have ended."""
        with self._lock:
            for name, (heard, _) in list(self.result_handlers.items()):
                if heard is _ignore and any(is_text_of(each, name) for each in request_ids):
                    del self.result_handlers[name]


def _ignore(output: GenerationOutput) -> None:
    """Hear of an output of a request that was cancelled."""
