"""Runs the model for texts that come and go: short prompts alone, long ones beside the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lookahead_hf import compat
from lookahead_hf.batching.scheduler import Scheduler
from lookahead_hf.cache.texts import TextCache
from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.draft import DraftTree
from lookahead_hf.patches.layers import CompiledSteps
from lookahead_hf.rows import Rows
from lookahead_hf.runner import non_finite
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.layout import BlockLayout
from lookahead_hf.runner.outputs import StepOutputs


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt that a row holds in the cache, [tokens] int64, and the logits after it."""

    ids: np.ndarray
    logits: torch.Tensor  # [1, 1, vocab]


class QueueRunner(Runner):
    """Runs steps of texts that come and go, which also read the chunks that are scheduled.

    A row holds its prompt until `forget` is called or another prompt takes the row. Meanwhile other
    texts of the same prompt begin with a copy.

    Attributes:
        step_tokens: Tokens that steps have fed for each row so far, [rows] int64. Where blocks are
            padded, live rows have equal shares of all tokens.
    """

    def __init__(
        self, model: object, num_rows: int, compiled: CompiledSteps, flat: bool, queue: Scheduler
    ) -> None:
        super().__init__(model, num_rows, None, compiled, flat)
        self._texts, self._queue = TextCache(num_rows), queue
        if queue.max_batch_tokens is not None:
            self.most_nodes = queue.max_batch_tokens // num_rows - 1
        self.step_tokens = np.zeros(num_rows, np.int64)
        self._prompts: dict[int, Prompt] = {}
        self._has_read = False

    def take(
        self, row: int, call: PreparedCall, before_steps: Callable[[], object]
    ) -> torch.Tensor:
        """Read a prompt as plain `generate` reads it alone; move its K and V into a free row.

        `before_steps` is called after the forward. Returns logits after the prompt, [1, 1, vocab].
        """
        self._prompts.pop(row, None)
        alone = Runner(self.model, 1, None, self._steps)
        outputs = alone.prefill(
            call.input_ids, call.generation_config, call.model_kwargs, before_steps
        )
        self._texts.take(row, alone.cache.slots)
        if not self.has_cache:
            self._begin_like(alone)
        self._is_nan_alone[row] = False
        logits = outputs.logits[:, -1:].clone()  # of a forward that may keep all
        self._prompts[row] = Prompt(call.input_ids[0].cpu().numpy(), logits)
        return logits

    def reads_in_chunks(self, prompt_ids: np.ndarray, beside: bool) -> bool:
        """Return whether a prompt is to be read in chunks: at once, it would delay other rows.

        Args:
            prompt_ids: The prompt, [tokens] int64. One that the model cannot embed fails at once.
            beside: Whether other rows decode.
        """
        most = self._queue.max_batch_tokens
        if not (self.is_flat and self.has_cache and (beside or len(prompt_ids) > (most or np.inf))):
            return False
        vocab_size = int(compat.text_config(self.model).vocab_size)
        return bool(prompt_ids.min() >= 0 and prompt_ids.max() < vocab_size)

    def read(self, row: int, prompt_ids: np.ndarray) -> None:
        """Begin to read a prompt, [tokens] int64, in chunks in a free row."""
        self._prompts.pop(row, None)
        self._texts.free(row)
        self._texts.slots.reserve(len(prompt_ids))
        # A mask does not hold back NaN that the row's last text may have left.
        non_finite.clear(self._texts.slots, [row])
        self._queue.reading[row], self._is_nan_alone[row] = prompt_ids, False

    def launch(self, rows: Rows, draft: DraftTree) -> StepOutputs:
        self._has_read = bool(self._queue.reading)
        before = self.num_fed
        step = self._launch_beside(rows, draft) if self._has_read else super().launch(rows, draft)
        if not self.is_flat:
            shares = np.linspace(0, self.num_fed - before, int(rows.live.sum()) + 1)
            self.step_tokens[rows.live] += np.diff(shares.astype(np.int64))
        return step

    def run(
        self, fed: Sequence[np.ndarray], draft: DraftTree, is_prompt: bool = False
    ) -> StepOutputs:
        num_fed, nodes = np.array([len(tokens) for tokens in fed]), np.diff(draft.row_offsets)
        self.step_tokens += np.where(num_fed > 0, num_fed + nodes, 0)
        return super().run(fed, draft, is_prompt)

    def _launch_beside(self, rows: Rows, draft: DraftTree) -> StepOutputs:
        """Run a step that also reads the next chunks of prompts."""
        fed, lengths = self.fed_tokens(rows), self._texts.slots.lengths
        token_budget = self._queue.budget(int(rows.live.sum()) + draft.num_nodes)
        chunks = self._queue.schedule(token_budget, lengths)
        for row, tokens in chunks.items():
            fed[row] = tokens
        step = self.run(fed, draft)
        # At once: where the step is repeated without its draft, the next chunks follow these.
        self.keep(np.array([min(1, len(chunks.get(row, ()))) for row in range(self.num_rows)]))
        for row in chunks:
            if lengths[row] == len(self._queue.reading[row]):
                ids = self._queue.reading.pop(row)
                self._prompts[row] = Prompt(ids, step.logits[row : row + 1, :1].clone())
        return step

    @property
    def step_is_typical(self) -> bool:
        return super().step_is_typical and not self._has_read

    def _ahead(self, rows: Rows) -> np.ndarray:
        return rows.lengths - 1  # positions begin at 0 in every text

    def holds_prompt(self, row: int) -> bool:
        """Return whether a row holds a whole prompt."""
        return row in self._prompts

    def holder(self, prompt_ids: Any) -> int | None:
        """Return a row that holds these tokens as its prompt, None if there is none.

        Layers with a window drop the end of the prompt when the text behind it has grown.
        """
        for row, prompt in self._prompts.items():
            if np.array_equal(prompt.ids, prompt_ids) and self._texts.holds(row, len(prompt_ids)):
                return row
        return None

    def share(self, row: int, source: int) -> torch.Tensor:
        """Give a free row the prompt of a row, perhaps its own; return the logits after it."""
        prompt = self._prompts[source]
        self._texts.share(row, source, len(prompt.ids))
        self._prompts[row], self._is_nan_alone[row] = prompt, False
        return prompt.logits

    def forget(self, rows: Iterable[int]) -> None:
        """Empty rows without a text."""
        for row in rows:
            self._prompts.pop(row, None)
            if self._texts.slots.lengths[row]:
                self._texts.free(row)

    def renew(self, compiled: CompiledSteps) -> None:
        """Go on with weights that may have changed, and with other compiled layers.

        Texts go on with what they hold, which no other text may copy; prompts that are being read
        begin again.
        """
        self._steps = compiled
        self._prompts.clear()
        for row, prompt_ids in list(self._queue.reading.items()):
            self.read(row, prompt_ids)

    def _begin_like(self, alone: Runner) -> None:
        """Lay steps out as the runner of the first prompt does; positions count from each text."""
        self._cache, self._kinds = self._texts, alone._kinds
        first = torch.zeros_like(alone._next_position)  # [..., 1, 1]
        shape = *first.shape[:-2], self.num_rows, 1
        self._next_position = first.expand(shape)
        self._layout = BlockLayout(
            self.model, self._texts, self._kinds, alone._extras, self._next_position
        )
