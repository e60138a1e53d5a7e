"""Continuous batching with transformers' interface: manager, progress, threads."""

from __future__ import annotations

import copy
import ctypes
import multiprocessing
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Set
from typing import Any

import torch
from transformers.utils.logging import tqdm

from lookahead_hf import stats
from lookahead_hf.generation.decode import run
from lookahead_hf.model.compat.batching import GenerationOutput, QueueManager, fill
from lookahead_hf.ngram_pool.compilation import drafting
from lookahead_hf.queue.queues import RequestQueue, Router, Waiting
from lookahead_hf.queue.request import UNSAID, Job, Maker, own_objects, request_seed
from lookahead_hf.queue.session import new_session
from lookahead_hf.stats import SpeculativeStats

EVERY_SECONDS = 0.2
"""Least time between two updates of the numbers beside the bar."""


class Progress:
    """Shows finished requests, tokens per second, live rows and tokens per step."""

    def __init__(self, num_requests: int | None) -> None:
        """`num_requests`: the total, None if it is not known."""
        self._bar = tqdm(total=num_requests, unit="request")
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


_SOFT_PAUSE = 1
"""omp_pause_soft of OpenMP 5: the threads keep their data and can be started again."""

_PROCESS = os.getpid()
"""Id of the process that imported this module, to recognise forked ones."""


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


class CallersThread:
    """A run that the caller's own thread decodes, with the methods of a thread."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run, self._is_alive = run, True

    def is_alive(self) -> bool:
        """Return whether the run has not begun."""
        return self._is_alive

    def run(self) -> None:
        """Decode, unless that was done or given up."""
        if self._is_alive:
            self._is_alive = False
            self._run()

    def join(self, timeout: float | None = None) -> None:
        """Give up a run that has not begun, since nobody has asked for a result."""
        self._is_alive = False


def _is_left_alone() -> bool:
    """Return whether the process ends, and waits for nothing but threads of managers."""
    if threading.main_thread().is_alive():
        return False
    others = (each for each in threading.enumerate() if not each.daemon and each.is_alive())
    return all(each.name.startswith(RUN) for each in others)


RUN = "lookahead_hf queue"
"""The beginning of the names of managers' threads."""

IDLE_SECONDS = 0.1
"""Longest time between two looks for requests in an idle run."""


class SpeculativeBatchingManager(QueueManager):
    """Decodes requests together and speculatively, with the methods of transformers' manager.

    Every text is the one that `generate` writes for its prompt alone; see `request_seed` for
    samples. A cancelled request delivers nothing more.
    """

    def __init__(
        self,
        maker: Maker,
        max_slots: int,
        *,
        max_batch_tokens: int | None,
        max_queue_size: int,
        seed_of: Callable[[int], int],
        in_call: bool,
        is_run: bool,
        progress: Progress | None,
        config: Any = None,
    ) -> None:
        """Prepare a run, without a thread.

        Args:
            maker: Turns requests into calls of `generate`; it has checked the model.
            max_slots: Most texts that are decoded together.
            max_batch_tokens: Most tokens of a step, None for any number.
            max_queue_size: Most waiting requests, 0 for any number; adding more blocks.
            seed_of: Returns the seed of a text by its number.
            in_call: Whether the caller's thread decodes as soon as it asks for a result.
            is_run: Whether `last_stats` is the sum of all requests, since one call made them.
            progress: A progress bar, or None.
            config: transformers' settings of continuous batching, shown to callers.
        """
        generation_config = copy.copy(maker.generation_config)
        eos = generation_config.eos_token_id
        eos = eos.tolist() if isinstance(eos, torch.Tensor) else eos
        generation_config.eos_token_id = UNSAID if eos is None else eos
        requests = RequestQueue(max_queue_size, self._takes_requests, self._has_ended)
        fill(self, maker.model, generation_config, requests, Router(), config)
        self.maker, self.max_slots, self.max_batch_tokens = maker, max_slots, max_batch_tokens
        self._in_call, self.progress = in_call, progress
        self._is_run = is_run
        self._sum: SpeculativeStats | None = None
        self._jobs: deque[Job] = deque()  # the other texts of the request that was taken last
        self._seed_of = seed_of

    @property
    def logit_processor(self) -> Any:
        """The processors that the settings of the run ask for; `clear` turns them off."""
        return self.maker.processors

    def warmup(self) -> None:
        """Load the compiled functions for drafting, if they are on disk."""
        drafting.ready(IDLE_SECONDS)
        self.warmed_up = True

    def start(self) -> None:
        """Start decoding in a new thread, or in the caller's as soon as it asks for a result."""
        self.batch_processor = self.maker  # for `stop`, which asks whether there is anything
        if not self._in_call:
            end_team()
            super().start()
            if self.thread is not None:
                self.thread.name = RUN
            return
        self.background_thread_status.clear()
        self.thread = CallersThread(self.decode)

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """Return the next result, as transformers' manager does; None after the last one.

        Raises:
            RuntimeError: An exception has ended the run, and all results were taken.
        """
        status, end = self.background_thread_status, time.monotonic() + (timeout or 0)
        if isinstance(self.thread, CallersThread) and self.thread.is_alive():
            status.request_stop(status.FLUSH_AND_STOP, self.distributed_helper.global_rank)
            self.thread.run()
        results = self.output_router.output_queue
        while True:
            is_over = not self.is_running()  # asked first: what the run has delivered is there
            left = IDLE_SECONDS if timeout is None else min(end - time.monotonic(), IDLE_SECONDS)
            found = super().get_result(request_id, max(left, 0.0))
            if found is not None or (request_id is not None and not results.empty()):
                return found
            if is_over and status.fatal_error is not None:
                raise RuntimeError("the run was ended by an exception") from status.fatal_error
            if is_over or (timeout is not None and left <= 0):
                return None

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Stop the run as transformers' manager does; an interrupt gives up what waits.

        The model never keeps the manager: making another one costs nothing.
        """
        hard_stop |= isinstance(sys.exc_info()[1], KeyboardInterrupt)
        super().stop(block, timeout, hard_stop=hard_stop)

    def join(self, *args: Any, **kwargs: Any) -> None:
        """Wake the thread if it is idle, and wait for it."""
        self.wake()
        super().join(*args, **kwargs)

    def add_request(
        self, input_ids: list[int], request_id: str | None = None, *args: Any, **kwargs: Any
    ) -> str | None:
        """Add a request, as with transformers' manager.

        Raises:
            TypeError: The id cannot be hashed, so that no result would be found by it.
        """
        if not isinstance(request_id, Hashable):
            kind = type(request_id).__name__
            raise TypeError(f"a request_id has to be hashable, which a {kind} is not: pass a str")
        return super().add_request(input_ids, request_id, *args, **kwargs)

    def cancel_request(self, request_id: str) -> None:
        """Cancel a request with all of its texts, or one text by the id of its result.

        Waiting texts are cancelled at once, others before their next step. As with transformers'
        manager nothing more is delivered, so `request_id_iter` goes on until the manager stops. The
        id can be reused at once for another request. Unknown ids are ignored.
        """
        self.output_router.cancel(request_id, self.input_queue.cancel)
        self.wake()

    def register_result_handler(self, request_id: str, callback: Callable[..., Any]) -> None:
        """Let the running event loop call a function with each output of a request.

        It is not called after the request is cancelled, nor for a later request with the same id.
        """
        self.output_router.hear(request_id, callback)

    # The session of a run calls the following methods, in the thread of the run.

    def take(self, in_use: Set[int] = frozenset()) -> Job | None:
        """Return the next waiting text none of whose objects is in use, None if there is none."""
        while not self._jobs:
            request = self.input_queue.take(in_use)
            if request is None:
                return None
            self._jobs += self._split(request)
        # Copies of a function are the function itself, which the texts of a request then share.
        return self._jobs.popleft() if self._jobs[0].objects.isdisjoint(in_use) else None

    def cancelled(self) -> Mapping[str, int]:
        """Return the ids that were cancelled since the last time, for `Job.is_among`."""
        found = self.output_router.take_cancelled()
        self._jobs = deque(job for job in self._jobs if not job.is_among(found))
        return found

    def stops(self) -> bool:
        """Return whether to give up the requests in progress: nobody may take their results."""
        status = self.background_thread_status
        return bool(status.local_status >= status.HARD_STOP) or _is_left_alone()

    def pauses(self) -> bool:
        """Wait while the run is paused; return whether it was."""
        if not self.background_thread_status.is_pause_requested():
            return False
        self.background_thread_status.pause_and_wait()
        return True

    def deliver(self, job: Job, record: SpeculativeStats | None = None) -> None:
        """Deliver the output of a request so far, with its statistics at the end."""
        output, found = job.state.to_generation_output(), job.log_probs
        output.logprobs, output.top_logprobs = list(found.of_tokens), list(found.top)
        output.prompt_logprobs = found.of_prompt
        output.speculative_stats = record
        if record is not None:
            if self._is_run:
                self._sum = record if self._sum is None else stats.joined(self._sum, record)
            stats.publish(self.model, self._sum or record)
            stats.tell(self.model, record)
        if self.progress is not None and output.is_finished():
            self.progress.finished(record)
        self.output_router.deliver(output, job)

    def _takes_requests(self) -> bool:
        """Return whether the run will take waiting requests.

        It will not while its own thread waits, in a processor or criterion that adds requests.
        """
        status, thread = self.background_thread_status, threading.current_thread()
        going = self.is_running() and status.can_accept_new_requests() is None
        waits = thread is self.thread or status.is_pause_requested(local=True)
        return going and not waits

    def _has_ended(self) -> bool:
        """Return whether the run has ended, so that waiting requests fail."""
        status = self.background_thread_status
        return bool(status.local_status == status.STOPPED)

    def _split(self, request: Waiting) -> list[Job]:
        """Return the texts of a request, the one with its own id last.

        Each gets copies of the request's processors and criteria. If these cannot be copied, all
        texts of the request fail.
        """
        state, name = request.state, request.state.request_id
        ids = [*(f"{name}__child#{child}" for child in range(state.num_children)), name]
        try:
            states = [*map(state.fork, ids[:-1]), state]
        except Exception as error:  # an object that cannot be copied
            for each in ids:
                state.request_id = each
                self.output_router.fail_and_deliver(state, error)
            return []
        jobs = []
        for index, each in enumerate(states, request.first):
            if each.request_id in request.cancelled:
                continue
            each.num_children = 0
            names = frozenset({each.request_id, name})
            own = each.logit_processor_kwargs.pop("seed", None)
            seed = self._seed_of(index) if own is None else own
            if own is not None and each is not state:
                seed = request_seed(own, 1 + index - request.first)
            jobs.append(Job(each, index, seed, names, own_objects(each)))
        return jobs

    def decode(self) -> None:
        try:
            device = self.model.device
            if device.type == "cuda" and device.index is not None:
                torch.cuda.set_device(device)  # of this thread
            with torch.no_grad():
                self._decode_all()
        except Exception as fatal:
            self.end_with(fatal)
        except BaseException as fatal:  # whatever ends the thread, SystemExit included
            self.end_with(RuntimeError(f"{fatal!r} ended the run"))
            raise
        finally:
            self.background_thread_status.mark_as_stopped()  # first, so that nothing is added later
            error = RuntimeError("the run was stopped before this request was begun")
            self.fail_waiting(error)
            if self.progress is not None:
                self.progress.close()

    def _decode_all(self) -> None:
        status = self.background_thread_status
        while not self.stops():
            self.pauses()
            if self._jobs or not self.input_queue.empty():
                run(new_session(self))
            elif status.local_status == status.FLUSH_AND_STOP:
                return
            else:
                self.cancelled()  # ids that nobody has any more
                self.sleep(IDLE_SECONDS)

    def fail_waiting(self, error: Exception) -> None:
        self.cancelled()
        while (job := self.take()) is not None:
            self.output_router.fail_and_deliver(job.state, error)
