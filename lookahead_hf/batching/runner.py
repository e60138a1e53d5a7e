"""Runs the model for texts that come and go: short prompts alone, long ones beside the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lookahead_hf import compat
from lookahead_hf.cache.texts import TextCache
from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.draft import DraftTree
from lookahead_hf.patches.layers import CompiledSteps
from lookahead_hf.rows import Rows
from lookahead_hf.runner import non_finite
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.layout import BlockLayout
from lookahead_hf.runner.outputs import StepOutputs

PIECE = 128
"""Tokens of prompts that a step reads beside the rows that decode.

With SmolLM2-135M in bfloat16 on one core, a prompt of 1,418 tokens held other rows up for 1.2 s. In
such pieces they wait 0.17 s, and the queue takes as long as before.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt that a row holds in the cache.

    Attributes:
        ids: Its tokens, [tokens] int64.
        logits: Logits after it, [1, 1, vocab].
    """

    ids: np.ndarray
    logits: torch.Tensor


class RefilledRunner(Runner):
    """Runs steps of texts that come and go; prompts run at once or beside the steps of others.

    A row holds its prompt as long as its text goes on, and after that until `forget` is called or
    another prompt takes the row. Meanwhile other texts of the same prompt begin with a copy.
    `step_tokens`, [rows], counts the tokens that steps have fed for each row so far; where blocks
    are padded, live rows have equal shares of all tokens.
    """

    def __init__(
        self,
        model: object,
        num_rows: int,
        compiled: CompiledSteps,
        flat: bool,
        most_tokens: int | None,
    ) -> None:
        """Prepare for the requests of one run, with at most `most_tokens` per step if given."""
        super().__init__(model, num_rows, None, compiled, flat)
        self._texts = TextCache(num_rows)
        self.most_tokens = most_tokens
        if most_tokens is not None:
            self.most_nodes = most_tokens // num_rows - 1
        self.step_tokens = np.zeros(num_rows, np.int64)
        self._reading: dict[int, np.ndarray] = {}  # prompts that are being read, by row
        self._prompts: dict[int, Prompt] = {}
        self._has_read = False

    def take(
        self, row: int, call: PreparedCall, before_steps: Callable[[], object]
    ) -> torch.Tensor:
        """Run a prompt as plain `generate` runs it alone, and move its K and V into a free row.

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
        self._prompts[row] = prompt = Prompt(call.input_ids[0].cpu().numpy(), logits)
        return prompt.logits

    def reads_in_pieces(self, prompt_ids: np.ndarray, beside: bool) -> bool:
        """Return whether a prompt is to be read in pieces: at once, it would hold up other rows.

        Args:
            prompt_ids: The prompt, [tokens] int64. One that the model cannot embed fails at once.
            beside: Whether other rows decode.
        """
        waits = beside or len(prompt_ids) > (self.most_tokens or len(prompt_ids))
        if not (waits and self.is_flat and self.has_cache):
            return False
        vocab_size = int(compat.text_config(self.model).vocab_size)
        return bool(prompt_ids.min() >= 0 and prompt_ids.max() < vocab_size)

    def read(self, row: int, prompt_ids: np.ndarray) -> None:
        """Begin to read a prompt, [tokens] int64, in a free row, in pieces beside the steps."""
        self._prompts.pop(row, None)
        self._texts.free(row)
        self._texts.slots.reserve(len(prompt_ids))
        # A mask does not hold back NaN that the row's last text may have left.
        non_finite.clear(self._texts.slots, [row])
        self._reading[row], self._is_nan_alone[row] = prompt_ids, False

    def reads(self, prompt_ids: np.ndarray) -> bool:
        """Return whether some row is in the middle of this prompt, [tokens] int64."""
        return any(np.array_equal(ids, prompt_ids) for ids in self._reading.values())

    def launch(self, rows: Rows, draft: DraftTree) -> StepOutputs:
        self._has_read = bool(self._reading)
        before = self.num_fed
        step = self._read_beside(rows, draft) if self._has_read else super().launch(rows, draft)
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

    def _read_beside(self, rows: Rows, draft: DraftTree) -> StepOutputs:
        """Run a step that also reads the next pieces of prompts."""
        fed, pieces = self.fed_tokens(rows), np.zeros(self.num_rows, np.int64)
        room = PIECE
        if self.most_tokens is not None:
            room = self.most_tokens - int(rows.live.sum()) - draft.num_nodes
        for row, ids in self._reading.items():
            first = int(self._texts.slots.lengths[row])
            fed[row] = ids[first : first + room - pieces.sum()]
            pieces[row] = len(fed[row])
        step = self.run(fed, draft)
        # At once: where the step is repeated without its draft, the next pieces follow these.
        self.keep(np.minimum(pieces, 1))
        for row in np.flatnonzero(pieces).tolist():
            if self._texts.slots.lengths[row] == len(self._reading[row]):
                ids = self._reading.pop(row)
                self._prompts[row] = Prompt(ids, step.logits[row : row + 1, :1].clone())
        return step

    @property
    def step_is_typical(self) -> bool:
        return super().step_is_typical and not self._has_read

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
        """Give a free row the prompt that a row holds, which may be the same row.

        Returns:
            Logits after the prompt, [1, 1, vocab].
        """
        prompt = self._prompts[source]
        self._texts.share(row, source, len(prompt.ids))
        self._prompts[row], self._is_nan_alone[row] = prompt, False
        return prompt.logits

    def free(self, row: int) -> None:
        """End the text of a row, which goes on holding its prompt."""
        self._reading.pop(row, None)

    def forget(self, rows: Iterable[int]) -> None:
        """Let rows without a text hold nothing any more."""
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
        for row, prompt_ids in list(self._reading.items()):
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
