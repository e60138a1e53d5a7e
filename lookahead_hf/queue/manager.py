"""The manager of continuous batching, with the methods of transformers' own."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lookahead_hf.model.compat.generation import GenerationOutput
from lookahead_hf.ngram_pool.compilation import drafting
from lookahead_hf.queue.request import request_state
from lookahead_hf.queue.scheduler import Engine
from lookahead_hf.queue.session import decode


def is_text_of(request_id: str, result_id: str) -> bool:
    """Return whether a result is of a request or of one of its further texts."""
    return result_id == request_id or str(result_id).startswith(f"{request_id}__child#")


_SOFT_PAUSE = 1  # omp_pause_soft of OpenMP 5: the threads keep their data and can be started again
_PROCESS = os.getpid()  # Id of the process that imported this module, to recognise forked ones

_logger = logging.getLogger(__name__)


def end_team() -> None:
    """End the team of the calling thread, which gets a new one when it computes again.

    A manager calls it before its own thread starts. Only libgomp, the OpenMP of torch on Linux,
    keeps such teams. In a forked process it would wait forever for threads that the fork has not
    copied, so a process that may have been forked keeps its team.
    """
    is_forked = os.getpid() != _PROCESS or multiprocessing.parent_process() is not None
    if sys.platform != "linux" or is_forked or torch.get_num_threads() == 1:
        return
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:  # of the OpenMP that torch has loaded
        pause(_SOFT_PAUSE)


RUN = "lookahead_hf queue"  # The beginning of the names of managers' threads
IDLE_SECONDS = 0.1  # Longest time between two looks for requests in an idle run
ROOM_SECONDS = 10.0  # Longest wait for room in a full queue, as of transformers' manager

GOES_ON, FLUSHES, GIVES_UP, HAS_ENDED = range(4)
"""How soon a run stops: never, once nothing waits, before the next step, or already."""


class SpeculativeBatchingManager:
    """Runs an engine in a thread of its own, with the methods of transformers' manager.

    A cancelled request delivers nothing more.

    Attributes:
        engine: Decodes the requests.
        fatal_error: What has ended the latest run, None unless an exception did.
        background_thread_status: What has the `fatal_error`, at which `transformers serve` looks.
        warmed_up: Whether `warmup` was called.
    """

    def __init__(self, engine: Engine, max_waiting: int = 0, config: Any = None) -> None:
        """Prepare a run, without a thread; the engine gives its outputs to the manager.

        `max_waiting`: most waiting requests, 0 for any number; adding more blocks. `config`:
        transformers' settings of continuous batching, shown to callers.
        """
        engine.hand_out, engine.stops, engine.pauses = self._take, self._gives_up, self._pauses_now
        engine.wait_for_room = self._wait_for_room
        self.engine, self.model = engine, engine.builder.model
        self.generation_config = engine.builder.generation_config
        self.num_return_sequences = self.generation_config.num_return_sequences or 1
        self.continuous_batching_config = config
        self.fatal_error: BaseException | None = None
        self.background_thread_status, self.warmed_up = self, False
        self._changed, self._max_waiting = engine.changed, max_waiting
        self._outputs: deque[GenerationOutput] = deque()
        self._handlers: dict[str, tuple[Callable[..., Any], Any]] = {}
        self._thread: threading.Thread | None = None
        self._stop, self._num_named = GOES_ON, 0
        self._pausing: list[int] = []  # ids of the threads that have asked for a pause
        self._is_paused = False

    def warmup(self) -> None:
        """Load the compiled functions for drafting, if they are on disk."""
        drafting.ready(IDLE_SECONDS)
        self.warmed_up = True

    def is_running(self) -> bool:
        """Return whether the thread of the run is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start decoding in a new thread, in the inference mode of the caller."""
        if self._stop == HAS_ENDED:  # as its results say before its thread has ended
            self.join()
        if self.is_running():
            _logger.warning("the manager is running already")
            return
        end_team()
        self._stop, self.fatal_error = GOES_ON, None
        given = (torch.is_inference_mode_enabled(),)
        self._thread = threading.Thread(target=self._run, args=given, name=RUN)
        self._thread.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Stop the run once nothing waits any more, or before the next step with `hard_stop`.

        Then, and after an interrupt, what was not finished fails. The model never keeps the
        manager, whatever `keep_for_next_session` says: making another one costs nothing.
        RuntimeError if the calling thread has paused the run.
        """
        if self._thread is None:
            _logger.warning("the manager was not started")
            return
        hard_stop |= isinstance(sys.exc_info()[1], KeyboardInterrupt)
        with self._changed:
            if threading.get_ident() in self._pausing:
                raise RuntimeError("a run cannot be stopped within its pause: leave that first")
            self._stop = max(self._stop, GIVES_UP if hard_stop else FLUSHES)
            self._changed.notify_all()
        if block:
            self.join(timeout=timeout)

    def join(self, stop_trigger_time: float = 0.0, timeout: float | None = None) -> None:
        """Wait for the end of a run that was stopped, for so many seconds at most."""
        if (thread := self._thread) is None:
            return
        thread.join(timeout)
        if thread.is_alive():
            _logger.warning("the thread of the run has not ended after %s s", timeout)
        else:
            self._thread = None

    def destroy(self) -> None:
        """Stop the run, if there is one."""
        if self.is_running():
            self.stop()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Pause the run inside, so that the caller can use or change the model.

        Requests in progress go on afterwards. Several threads may pause a run at the same time.
        RuntimeError if there is no run, or it ends before it pauses.
        """
        if not self.is_running():
            raise RuntimeError("Cannot pause generation while no generation loop is running.")
        with self._changed:
            self._pausing.append(threading.get_ident())
            self._changed.notify_all()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._is_paused or self._stop == HAS_ENDED)
                if not self._is_paused:
                    raise RuntimeError("the run has ended before it paused") from self.fatal_error
            yield
        finally:
            with self._changed:
                self._pausing.remove(threading.get_ident())
                self._changed.notify_all()

    def add_request(
        self, input_ids: list[int], request_id: str | None = None, *args: Any, **own: Any
    ) -> str | None:
        """Add a request, as with transformers' manager; `request_state` has all arguments.

        A `group=`, a `Group`, gets free slots in turn with the others. Returns the request's id,
        None if the run is stopping and takes no more requests; queue.Full if as many wait as may.
        """
        if self._stop != GOES_ON:
            _logger.warning("the run is stopping: a request was dropped")
            return None
        if request_id is None:
            with self._changed:
                request_id, self._num_named = f"req_{self._num_named}", self._num_named + 1
        given = input_ids, request_id, self.num_return_sequences - 1
        group = own.pop("group", None)
        self.engine.add(request_state(*given, *args, **own), group)
        return request_id

    def add_requests(self, inputs: list[list[int]], *args: Any, **own: Any) -> list[str | None]:
        """Add a request for each prompt, all with the same arguments; return their ids."""
        return [self.add_request(each, None, *args, **own) for each in inputs]

    def cancel_request(self, request_id: str) -> None:
        """Cancel a request with all of its texts, or one text by the id of its result.

        Waiting texts are cancelled at once, others before their next step. As with transformers'
        manager nothing more is delivered, so `request_id_iter` goes on until the manager stops. The
        id can be reused at once for another request. Unknown ids are ignored.
        """
        with self._changed:
            self.engine.cancel(request_id)
            for name in [each for each in self._handlers if is_text_of(request_id, each)]:
                del self._handlers[name]
            kept = (each for each in self._outputs if not is_text_of(request_id, each.request_id))
            self._outputs = deque(kept)

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """Return the next result, or the next one of a request.

        None after `timeout` seconds, and once the run has ended and has no such result.
        RuntimeError if an exception has ended the run, and all results were taken.
        """

        def found() -> GenerationOutput | None:
            meant = (o for o in self._outputs if request_id in (None, o.request_id))
            return next(meant, None)

        def is_over() -> bool:
            return self._thread is None or self._stop == HAS_ENDED

        with self._changed:
            self._changed.wait_for(lambda: found() is not None or is_over(), timeout)
            output = found()
            if output is not None:
                self._outputs.remove(output)
            elif is_over() and self.fatal_error is not None and not self._outputs:
                raise RuntimeError("the run was ended by an exception") from self.fatal_error
            return output

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Iterate over all results until the run has ended."""
        while (output := self.get_result()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Iterate over the results of a request until it is finished, or the run has ended."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[..., Any]) -> None:
        """Let the running event loop call a function with each output of a request.

        It is not called after the request is cancelled, nor for a later request with the same id.
        """
        handlers = self._handlers

        def hear(output: GenerationOutput) -> None:
            if handlers.get(request_id) is not entry:
                return
            callback(output)
            with self._changed:
                if output.is_finished() and handlers.get(request_id) is entry:
                    del handlers[request_id]

        entry = hear, asyncio.get_running_loop()
        with self._changed:
            handlers[request_id] = entry

    def _wait_for_room(self) -> None:
        """Wait until a request may be added, for as long as transformers' manager waits."""

        def can_go_on() -> bool:
            is_full = 0 < self._max_waiting <= len(self.engine.waiting)
            return not is_full or self._stop == HAS_ENDED

        if not self._changed.wait_for(can_go_on, ROOM_SECONDS) or self._stop == HAS_ENDED:
            raise queue.Full

    # The thread of the run calls the following methods.

    def _take(self, output: GenerationOutput) -> bool:
        """Keep an output or pass it on; return whether the event loop of its handler lives."""
        name = output.request_id
        if name not in self._handlers:
            self._outputs.append(output)
            return True
        hear, loop = self._handlers[name]
        try:
            loop.call_soon_threadsafe(hear, output)
        except RuntimeError as error:
            del self._handlers[name]
            _logger.warning("nobody takes the text of %r: %s", name, error)
            return False
        return True

    def _gives_up(self) -> bool:
        """Return whether to give up the requests in progress: nobody may take their results."""
        if self._stop >= GIVES_UP or threading.main_thread().is_alive():
            return self._stop >= GIVES_UP
        # The process ends, unless a thread that is no manager's goes on.
        others = (each for each in threading.enumerate() if not each.daemon and each.is_alive())
        return all(each.name.startswith(RUN) for each in others)

    def _pauses_now(self) -> bool:
        """Wait while the run is paused; return whether it was."""
        with self._changed:
            if not self._pausing:
                return False
            self._is_paused = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pausing)
            self._is_paused = False
        return True

    def _run(self, use_inference_mode: bool) -> None:
        try:
            device = self.model.device
            if device.type == "cuda" and device.index is not None:
                torch.cuda.set_device(device)  # of this thread
            with torch.inference_mode(use_inference_mode):
                self._decode_all()
        except BaseException as fatal:  # whatever ends the thread, SystemExit included
            is_usual = isinstance(fatal, Exception)
            self.fatal_error = fatal if is_usual else RuntimeError(f"{fatal!r} ended the run")
            if not is_usual:
                raise
        finally:
            error = self.fatal_error or RuntimeError(
                "the run was stopped before this request was begun"
            )
            with self._changed:
                self._stop = HAS_ENDED  # first, so that nothing is added later
                self.engine.fail_waiting(error)
                self._changed.notify_all()

    def _decode_all(self) -> None:
        while not self.engine.stops():
            self._pauses_now()
            decode(self.engine)
            with self._changed:
                is_idle = not (self.engine.waiting or self._pausing)
                if is_idle and self._stop == FLUSHES:
                    return
                if is_idle:
                    self._changed.wait(IDLE_SECONDS)
