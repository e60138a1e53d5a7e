"""Which requests come next, and how their prompts are read into free rows."""

from __future__ import annotations

import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from lookahead_hf import stats
from lookahead_hf.cache.adopt import TextCache
from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.draft import DraftTree
from lookahead_hf.model import compat
from lookahead_hf.model.compat.generation import GenerationOutput, RequestState, RequestStatus
from lookahead_hf.queue.request import (
    Group,
    QueuedRequest,
    RequestBuilder,
    own_objects,
    request_seed,
    text_ids,
)
from lookahead_hf.rows import Rows
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.outputs import StepOutputs
from lookahead_hf.runner.prefill import prefill


@dataclass(eq=False)
class Engine:
    """The requests of a run: those that wait, and what becomes of the others.

    `session.decode` decodes them together. Every text is the one that `generate` writes for its
    prompt alone; see `request_seed` for samples. Threads may add and cancel requests meanwhile.
    """

    builder: RequestBuilder  # turns requests into calls of `generate`; it has checked the model
    max_slots: int  # most texts that are decoded together
    max_batch_tokens: int | None  # most tokens of a step, None for any number
    seed: int  # the seed of the run
    # Takes an output; returns whether anybody hears of its text.
    hand_out: Callable[[GenerationOutput], bool] = lambda output: True
    stops: Callable[[], bool] = lambda: False  # returns whether to give up the requests in progress
    pauses: Callable[[], bool] = lambda: False  # waits in a pause; returns whether there was one
    wait_for_room: Callable[[], object] = lambda: None  # is called before a request is added
    # Calls a function that writes a text alone, which takes long, perhaps in another thread
    beside: Callable[[Callable[[], None]], object] = lambda write: write()
    waiting: deque[QueuedRequest] = field(default_factory=deque)  # by their turns
    taken: set[QueuedRequest] = field(default_factory=set)  # texts in progress
    # Held while requests and outputs change hands, and notified of it
    changed: threading.Condition = field(default_factory=threading.Condition)
    usual: Group = field(default_factory=Group)  # of requests without a group
    _num_texts: int = 0
    _turn: int = 0  # of the last text that was taken

    def add(self, state: RequestState, group: Group | None = None) -> None:
        """Add the texts of a request, which are numbered in this order; its own comes last.

        Each gets copies of the request's processors and criteria. The first waiting text of a group
        comes before the next ones of groups that have begun.
        """
        given, ids, group = state.logit_processor_kwargs, text_ids(state), group or self.usual
        own = given.pop("seed", None)
        states = [*map(state.fork, ids[:-1]), state]
        with self.changed:
            self.wait_for_room()
            for place, each in enumerate(states):
                each.num_children = 0
                seed = request_seed(self.seed, self._num_texts + place) if own is None else own
                if own is not None and each is not state:
                    seed = request_seed(own, 1 + place)
                names = frozenset({each.request_id, state.request_id})
                group.turn = max(group.turn + 2, self._turn + 1)
                job = QueuedRequest(each, seed, group.turn, names, own_objects(each))
                insort(self.waiting, job, key=attrgetter("turn"))
            self._num_texts += len(states)
            self.changed.notify_all()

    def cancel(self, name: str) -> None:
        """Cancel a request with all of its texts, or one text by its id; no output follows."""
        with self.changed:
            for job in (*self.waiting, *self.taken):
                job.is_cancelled |= name in job.names
            self.waiting = deque(job for job in self.waiting if not job.is_cancelled)
            self.changed.notify_all()

    def take(self) -> QueuedRequest | None:
        """Return the first waiting text none of whose objects is in use, None if there is none.

        Texts that share an object stay in order.
        """
        with self.changed:
            awaited = set[int]().union(*(job.objects for job in self.taken))
            for job in self.waiting:
                if job.objects.isdisjoint(awaited):
                    self.waiting.remove(job)
                    self.taken.add(job)
                    self._turn = max(self._turn, job.turn)
                    self.changed.notify_all()
                    return job
                awaited |= job.objects
        return None

    def release(self, job: QueuedRequest) -> None:
        """Let go of a text that has ended."""
        with self.changed:
            self.taken.discard(job)

    def deliver(self, job: QueuedRequest, record: stats.SpeculativeStats | None = None) -> None:
        """Hand out the output of a text so far, with its statistics at the end."""
        output, model = job.output(record), self.builder.model
        if record is not None:
            stats.publish(model, record)
            stats.notify(model, record)
        with self.changed:
            if not job.is_cancelled:
                job.is_cancelled = not self.hand_out(output)
                self.changed.notify_all()

    def fail(self, job: QueuedRequest, error: BaseException) -> None:
        """Hand out the output of a text that has failed."""
        job.state.status = RequestStatus.FAILED
        job.state.error = f"{type(error).__name__}: {error}"
        self.deliver(job)

    def fail_waiting(self, error: BaseException) -> None:
        """Fail all texts that have not begun."""
        with self.changed:
            while self.waiting:
                self.fail(self.waiting.popleft(), error)


CHUNK = 128
"""Most tokens of prompts that a step reads beside the rows that decode.

With SmolLM2-135M in bfloat16 on one core, a prompt of 1,418 tokens held other rows up for 1.2 s. In
such chunks they wait 0.17 s, and the queue takes as long as before.
"""


class Prompts:
    """The prompts that the rows of a runner hold, whole or in part.

    A row holds its prompt until `forget` is called or another prompt takes the row. Meanwhile other
    texts of the same prompt begin with a copy.

    Attributes:
        reading: Prompts that are read beside the steps of other rows, by row, [tokens] int64.
    """

    def __init__(self, runner: Runner, max_batch_tokens: int | None) -> None:
        """`max_batch_tokens`: most tokens of a step, None for any number."""
        self._runner, self._most = runner, max_batch_tokens
        self.reading: dict[int, np.ndarray] = {}
        self._texts = TextCache(runner.num_rows)
        # Whole prompts by row, [tokens] int64, and the logits after each, [vocab]
        self._held: dict[int, tuple[np.ndarray, torch.Tensor]] = {}

    def take(
        self, row: int, call: PreparedCall, before_steps: Callable[[], object]
    ) -> torch.Tensor:
        """Read a prompt as plain `generate` reads it alone; move its K and V into a free row.

        `before_steps` is called after the forward. Returns the logits after the prompt, [vocab].
        """
        self._clear(row)
        is_packed = self._runner.is_packed and self._runner.reads_prompts()
        alone = Runner(self._runner.model, 1, None, self._runner.steps, is_packed)
        outputs = prefill(alone, call, before_steps)
        assert alone.beginning is not None
        if self._runner.beginning is None:
            self._texts.build_like(alone.cache.slots)
            # Steps are laid out as behind the first prompt; positions count from each text.
            first = torch.zeros_like(alone.beginning.next_position)  # [..., 1, 1]
            everywhere = first.expand(*first.shape[:-2], self._runner.num_rows, 1)
            state = replace(alone.beginning, cache=self._texts, next_position=everywhere)
            self._runner.begin(state)
        self._texts.take(row, alone.cache.slots)
        logits = outputs.logits[0, -1].clone()  # of a forward that may keep all
        self._held[row] = call.input_ids[0].cpu().numpy(), logits
        return logits

    def _clear(self, row: int) -> None:
        """Forget the prompt of a row that another one takes."""
        self._held.pop(row, None)
        self._runner.forget_nan(row)

    def reads_in_chunks(self, prompt_ids: np.ndarray, beside: bool) -> bool:
        """Return whether to read a prompt, [tokens], in chunks: else it would delay rows `beside`.

        One that the model cannot embed fails at once.
        """
        runner, most = self._runner, self._most or np.inf
        if not runner.is_packed or runner.beginning is None:
            return False
        vocab_size = int(compat.text_config(runner.model).vocab_size)
        fits = bool(prompt_ids.min() >= 0 and prompt_ids.max() < vocab_size)
        return fits and (beside or len(prompt_ids) > most)

    def read(self, row: int, prompt_ids: np.ndarray) -> None:
        """Begin to read a prompt, [tokens] int64, in chunks in a free row."""
        self._clear(row)
        self._texts.free(row)
        self._texts.slots.reserve(len(prompt_ids))
        # A mask does not hold back NaN that the row's last text may have left.
        self._texts.slots.clear([row])
        self.reading[row] = prompt_ids

    def launch(self, rows: Rows, draft: DraftTree) -> StepOutputs:
        """Launch a step of the runner that also reads the next chunks of prompts, if there are any.

        If the step is repeated, the next chunks wait for the step after it.
        """
        if not self.reading:
            return self._runner.launch(rows, draft)
        lengths = self._texts.slots.lengths
        left = CHUNK
        if self._most is not None:
            left = self._most - int(rows.live.sum()) - draft.num_nodes
        chunks = {}
        for row, ids in self.reading.items():  # those that were begun first come first
            first = int(lengths[row])
            chunks[row] = ids[first : first + left]
            left -= len(chunks[row])
        step = self._runner.launch_beside(rows, draft, chunks)
        for row in chunks:
            if lengths[row] == len(self.reading[row]):
                self._held[row] = self.reading.pop(row), step.logits[row, 0].clone()
        return step

    def is_reading(self, prompt_ids: np.ndarray) -> bool:
        """Return whether some row is in the middle of this prompt, [tokens] int64."""
        return any(np.array_equal(ids, prompt_ids) for ids in self.reading.values())

    def holds(self, row: int) -> bool:
        """Return whether a row holds a whole prompt."""
        return row in self._held

    def holder(self, prompt_ids: Any) -> int | None:
        """Return a row that holds these tokens as its prompt, None if there is none.

        Layers with a window drop the end of the prompt when the text behind it has grown.
        """
        for row, (ids, _) in self._held.items():
            if np.array_equal(ids, prompt_ids) and self._texts.holds(row, len(prompt_ids)):
                return row
        return None

    def share(self, row: int, source: int) -> torch.Tensor:
        """Give a free row the prompt of a row, perhaps its own; return the logits after it."""
        ids, logits = self._held[source]
        self._texts.share(row, source, len(ids))
        self._clear(row)
        self._held[row] = ids, logits
        return logits

    def forget(self, rows: Iterable[int]) -> None:
        """Empty rows without a text."""
        for row in rows:
            self._held.pop(row, None)
            if self._texts.slots.lengths[row]:
                self._texts.free(row)

    def renew(self) -> None:
        """Go on with weights that may have changed.

        Texts go on with what they hold, which none may copy; prompts in the middle begin again.
        """
        self._runner.renew()
        self._held.clear()
        for row, prompt_ids in list(self.reading.items()):
            self.read(row, prompt_ids)
