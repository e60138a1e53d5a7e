"""The manager of continuous batching: transformers' own, with speculation behind its queues."""

from __future__ import annotations

import copy
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Set
from typing import Any

import torch

from lookahead_hf import ngram_pool, stats
from lookahead_hf.batching.progress import Progress
from lookahead_hf.batching.queues import RequestQueue, Router, Waiting
from lookahead_hf.batching.request import UNSAID, Job, Maker, own_objects, request_seed
from lookahead_hf.batching.session import new_session
from lookahead_hf.batching.threads import CallersThread, end_team
from lookahead_hf.compat.batching import GenerationOutput, QueueManager, fill
from lookahead_hf.generation.decode import run
from lookahead_hf.stats import SpeculativeStats

IDLE_SECONDS = 0.1
"""Longest time for which an idle run does not look for requests."""


class SpeculativeBatchingManager(QueueManager):
    """Decodes requests together and speculatively, behind the methods of transformers' manager.

    Every text is the one that `generate` writes for its prompt alone; see `request_seed` for
    samples. A cancelled request yields nothing more.
    """

    def __init__(
        self,
        maker: Maker,
        max_slots: int,
        *,
        max_batch_tokens: int | None,
        max_queue_size: int,
        seed: int | None,
        in_call: bool,
        is_run: bool,
        progress: Progress | None,
    ) -> None:
        """Prepare a run, without a thread.

        Args:
            maker: Turns requests into calls of `generate`; it has checked the model.
            max_slots: Most texts that are decoded together.
            max_batch_tokens: Most tokens of a step, None for any number.
            max_queue_size: Most requests that wait; adding another one waits; 0: any number.
            seed: The seed of the samples, None to draw one from torch's default generator.
            in_call: Whether the caller's thread decodes as soon as it asks for a result.
            is_run: Whether `last_stats` adds up the requests, since one call makes all of them.
            progress: Shows how the requests get on, None for no bar.
        """
        generation_config = copy.copy(maker.generation_config)
        eos = generation_config.eos_token_id
        eos = eos.tolist() if isinstance(eos, torch.Tensor) else eos
        generation_config.eos_token_id = UNSAID if eos is None else eos
        requests = RequestQueue(max_queue_size, self._takes_requests, self._has_ended)
        fill(self, maker.model, generation_config, requests, Router())
        self.maker, self.max_slots, self.max_batch_tokens = maker, max_slots, max_batch_tokens
        self._in_call, self.progress = in_call, progress
        self._is_run = is_run
        self._sum: SpeculativeStats | None = None
        self._jobs: deque[Job] = deque()  # the other texts of the request that was taken last
        self._seed = int(torch.randint(2**31, ())) if seed is None else seed

    def warmup(self) -> None:
        """Wait until the compiled functions of drafting are loaded."""
        ngram_pool.wait_until_loaded(IDLE_SECONDS)
        self.warmed_up = True

    def start(self) -> None:
        """Begin the run: in a thread of its own, or as soon as the caller asks for a result."""
        self.batch_processor = self.maker  # for `stop`, which asks whether there is anything
        if not self._in_call:
            end_team()
            super().start()
            return
        self.background_thread_status.clear()
        self.thread = CallersThread(self.decode)

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """Return the next result, as transformers' manager does."""
        if isinstance(self.thread, CallersThread) and self.thread.is_alive():
            status = self.background_thread_status
            status.request_stop(status.FLUSH_AND_STOP, self.distributed_helper.global_rank)
            self.thread.run()
        return super().get_result(request_id, timeout)

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

        What waits is cancelled at once, what is in progress before its next step. As with
        transformers' manager nothing more is delivered, so that `request_id_iter` goes on until the
        manager stops. The id can be used again at once: what is added later is another request.
        Unknown ids are ignored.
        """
        self.output_router.cancel(request_id, self.input_queue.cancel)
        self.wake()

    def register_result_handler(self, request_id: str, callback: Callable[..., Any]) -> None:
        """Let the running event loop call a function with each output of a request.

        That of a request that is cancelled is not called again, and leaves the handler of the next
        request with its id alone.
        """
        self.output_router.hear(request_id, callback)

    # What the session of a run asks, in the thread of the run.

    def take(self, in_use: Set[int] = frozenset()) -> Job | None:
        """Return the next text that waits and can begin, None if there is none.

        Args:
            in_use: The `objects` of the texts in progress; what brings one of them waits.
        """
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
        """Return whether requests in progress are to be given up."""
        status = self.background_thread_status
        return bool(status.local_status >= status.HARD_STOP)

    def pauses(self) -> bool:
        """Wait while somebody else uses the model; return whether there was any need to wait."""
        if not self.background_thread_status.is_pause_requested():
            return False
        self.background_thread_status.pause_and_wait()
        return True

    def deliver(self, job: Job, record: SpeculativeStats | None = None) -> None:
        """Pass on what a request has become so far, with statistics of its own at the end."""
        output = job.state.to_generation_output()
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
        """Return whether a run goes on and takes what waits, as soon as there is room.

        It does not while its own thread waits, in a processor or criterion that adds requests.
        """
        status, thread = self.background_thread_status, threading.current_thread()
        going = self.is_running() and status.can_accept_new_requests() is None
        waits = thread is self.thread or status.is_pause_requested(local=True)
        return going and not waits

    def _has_ended(self) -> bool:
        """Return whether the run has ended, and fails what still waits."""
        status = self.background_thread_status
        return bool(status.local_status == status.STOPPED)

    def _split(self, request: Waiting) -> list[Job]:
        """Return the texts of a request, the one with its own id last.

        Each has copies of the processors and criteria that the request brought. If these cannot be
        copied, all texts of the request fail.
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
            seed = request_seed(self._seed, index)
            names = frozenset({each.request_id, name})
            jobs.append(Job(each, index, seed, names, own_objects(each)))
        return jobs

    def decode(self) -> None:
        device = self.model.device
        try:
            if device.type == "cuda" and device.index is not None:
                torch.cuda.set_device(device)  # of this thread
            with torch.no_grad():
                self._decode_all()
        except Exception as fatal:
            self.end_with(fatal)
        finally:  # whatever ends the thread, SystemExit included
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
