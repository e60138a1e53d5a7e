"""Reads the prompts of a queue into free rows: short ones alone, long ones beside the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lookahead_hf.block.layout import PromptState
from lookahead_hf.cache.texts import TextCache
from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.draft import DraftTree
from lookahead_hf.model import compat
from lookahead_hf.queue.scheduler import Scheduler
from lookahead_hf.rows import Rows
from lookahead_hf.runner import non_finite
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.outputs import StepOutputs
from lookahead_hf.runner.prefill import prefill


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt that a row holds in the cache, [tokens] int64, and the logits after it."""

    ids: np.ndarray
    logits: torch.Tensor  # [vocab]


class Prompts:
    """The prompts that the rows of a runner hold, whole or in part.

    A row holds its prompt until `forget` is called or another prompt takes the row. Meanwhile other
    texts of the same prompt begin with a copy.
    """

    def __init__(self, runner: Runner, queue: Scheduler) -> None:
        self._runner, self._queue = runner, queue
        self._texts, self._held = TextCache(runner.num_rows), dict[int, Prompt]()

    def take(
        self, row: int, call: PreparedCall, before_steps: Callable[[], object]
    ) -> torch.Tensor:
        """Read a prompt as plain `generate` reads it alone; move its K and V into a free row.

        `before_steps` is called after the forward. Returns the logits after the prompt, [vocab].
        """
        self._clear(row)
        is_flat = self._runner.is_flat and self._runner.reads_prompts
        alone = Runner(self._runner.model, 1, None, self._runner.steps, is_flat)
        outputs = prefill(alone, call, before_steps)
        assert alone.beginning is not None
        if self._runner.beginning is None:
            self._texts.build_like(alone.cache.slots)
            self._runner.begin(self._begin_like(alone.beginning))
        self._texts.take(row, alone.cache.slots)
        logits = outputs.logits[0, -1].clone()  # of a forward that may keep all
        self._held[row] = Prompt(call.input_ids[0].cpu().numpy(), logits)
        return logits

    def _begin_like(self, alone: PromptState) -> PromptState:
        """Lay steps out as behind the first prompt; positions count from each text."""
        first = torch.zeros_like(alone.next_position)  # [..., 1, 1]
        everywhere = first.expand(*first.shape[:-2], self._runner.num_rows, 1)
        return replace(alone, cache=self._texts, next_position=everywhere)

    def _clear(self, row: int) -> None:
        """Forget the prompt of a row that another one takes."""
        self._held.pop(row, None)
        self._runner.forget_nan(row)

    def reads_in_chunks(self, prompt_ids: np.ndarray, beside: bool) -> bool:
        """Return whether a prompt is to be read in chunks: at once, it would delay other rows.

        Args:
            prompt_ids: The prompt, [tokens] int64. One that the model cannot embed fails at once.
            beside: Whether other rows decode.
        """
        runner, most = self._runner, self._queue.max_batch_tokens or np.inf
        if not runner.is_flat or runner.beginning is None:
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
        non_finite.clear(self._texts.slots, [row])
        self._queue.reading[row] = prompt_ids

    def launch(self, rows: Rows, draft: DraftTree) -> StepOutputs:
        """Launch a step of the runner that also reads the next chunks of prompts, if there are any.

        If the step is repeated, the next chunks wait for the step after it.
        """
        if not self._queue.reading:
            return self._runner.launch(rows, draft)
        lengths = self._texts.slots.lengths
        token_budget = self._queue.budget(int(rows.live.sum()) + draft.num_nodes)
        chunks = self._queue.schedule(token_budget, lengths)
        step = self._runner.launch_beside(rows, draft, chunks)
        for row in chunks:
            if lengths[row] == len(self._queue.reading[row]):
                ids = self._queue.reading.pop(row)
                self._held[row] = Prompt(ids, step.logits[row, 0].clone())
        return step

    def holds(self, row: int) -> bool:
        """Return whether a row holds a whole prompt."""
        return row in self._held

    def holder(self, prompt_ids: Any) -> int | None:
        """Return a row that holds these tokens as its prompt, None if there is none.

        Layers with a window drop the end of the prompt when the text behind it has grown.
        """
        for row, prompt in self._held.items():
            if np.array_equal(prompt.ids, prompt_ids) and self._texts.holds(row, len(prompt_ids)):
                return row
        return None

    def share(self, row: int, source: int) -> torch.Tensor:
        """Give a free row the prompt of a row, perhaps its own; return the logits after it."""
        prompt = self._held[source]
        self._texts.share(row, source, len(prompt.ids))
        self._clear(row)
        self._held[row] = prompt
        return prompt.logits

    def forget(self, rows: Iterable[int]) -> None:
        """Empty rows without a text."""
        for row in rows:
            self._held.pop(row, None)
            if self._texts.slots.lengths[row]:
                self._texts.free(row)

    def renew(self) -> None:
        """Go on with weights that may have changed.

        Texts go on with what they hold, which no other text may copy; prompts that are being read
        begin again.
        """
        self._runner.renew()
        self._held.clear()
        for row, prompt_ids in list(self._queue.reading.items()):
            self.read(row, prompt_ids)
