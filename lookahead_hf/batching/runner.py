"""Runs the model for texts that come and go: short prompts alone, long ones beside the steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from lookahead_hf import compat
from lookahead_hf.cache.refilled import RefilledCache
from lookahead_hf.draft import DraftTree
from lookahead_hf.generation.call import PreparedCall
from lookahead_hf.rows import Rows
from lookahead_hf.runner import non_finite
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.layout import BlockLayout
from lookahead_hf.runner.outputs import StepOutputs
from lookahead_hf.runner.packed_steps import PackedSteps

PIECE = 128
"""Tokens of prompts that a step reads beside the rows that decode.

With SmolLM2-135M in bfloat16 on one core, a prompt of 1,418 tokens held other rows up for 1.2 s. In
such pieces they wait 0.17 s, and the queue takes as long as before.
"""


class RefilledRunner(Runner):
    """A runner that takes a new prompt into a free row, at once or beside the steps of others."""

    def __init__(
        self,
        model: object,
        num_rows: int,
        packed: PackedSteps,
        flat: bool,
        most_tokens: int | None = None,
    ) -> None:
        """Prepare for the requests of one run.

        Args:
            model: The target.
            num_rows: Rows of the steps.
            packed: How steps and prompts use packed linear layers.
            flat: Whether steps feed the tokens of live rows alone.
            most_tokens: Most tokens of a step, at least one per row; None for any number.
        """
        super().__init__(model, num_rows, None, packed, flat)
        self._texts = RefilledCache(num_rows)
        self.most_tokens = most_tokens
        if most_tokens is not None:
            self.most_nodes = most_tokens // num_rows - 1
        self._unread: dict[int, np.ndarray] = {}  # of the prompts that are read, by row
        self._after: dict[int, torch.Tensor] = {}  # logits after prompts that were read, by row
        self._has_read = False

    def take(
        self, row: int, call: PreparedCall, before_steps: Callable[[], object]
    ) -> torch.Tensor:
        """Run a prompt as plain `generate` runs it alone, and move its K and V into a free row.

        Args:
            row: The row.
            call: The call of one row that the prompt belongs to.
            before_steps: Called after the forward.

        Returns:
            Logits after the prompt, [1, 1, vocab].
        """
        alone = Runner(self.model, 1, None, self._packed)
        outputs = alone.prefill(
            call.input_ids, call.generation_config, call.model_kwargs, before_steps
        )
        self._texts.take(row, alone.cache.slots)
        if not self.has_cache:
            self._begin_like(alone)
        self._is_nan_alone[row] = False
        logits: torch.Tensor = outputs.logits[:, -1:].clone()  # of a forward that may keep all
        return logits

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
        """Begin to read a prompt in a free row, piece by piece beside the steps of other rows.

        Args:
            row: The row.
            prompt_ids: The prompt, [tokens] int64.
        """
        self._texts.slots.reserve(len(prompt_ids))
        # A mask does not hold back NaN that the row's last text may have left.
        non_finite.clear(self._texts.slots, [row])
        self._unread[row], self._is_nan_alone[row] = prompt_ids, False

    def reads(self, row: int) -> bool:
        """Return whether a row is in the middle of its prompt."""
        return row in self._unread

    def after(self, row: int) -> torch.Tensor | None:
        """Return the logits after a prompt that was read, [1, 1, vocab]; None before its end."""
        return self._after.pop(row, None)

    def launch(self, rows: Rows, draft: DraftTree) -> StepOutputs:
        self._has_read = bool(self._unread)
        if not self._has_read:
            return super().launch(rows, draft)
        fed, pieces = self.fed_tokens(rows), np.zeros(self.num_rows, np.int64)
        room = PIECE
        if self.most_tokens is not None:
            room = self.most_tokens - int(rows.live.sum()) - draft.num_nodes
        for row, unread in self._unread.items():
            fed[row] = unread[: room - pieces.sum()]
            pieces[row] = len(fed[row])
        step = self.run(fed, draft)
        # At once: where the step is repeated without its draft, the next pieces follow these.
        self.keep(np.minimum(pieces, 1))
        for row in np.flatnonzero(pieces).tolist():
            self._unread[row] = self._unread[row][pieces[row] :]
            if not len(self._unread[row]):
                del self._unread[row]
                self._after[row] = step.logits[row : row + 1, :1].clone()
        return step

    @property
    def step_is_typical(self) -> bool:
        return super().step_is_typical and not self._has_read

    @property
    def can_share(self) -> bool:
        """Whether rows keep their whole prompts, so that another row can have a copy."""
        return self._texts.holds_all

    def share(self, row: int, source: int, length: int) -> None:
        """Give a free row the first tokens of another row's cache."""
        self._texts.share(row, source, length)
        self._is_nan_alone[row] = self._is_nan_alone[source]

    def free(self, row: int) -> None:
        """Let go of what a row holds in the cache."""
        self._texts.free(row)
        self._unread.pop(row, None)
        self._after.pop(row, None)

    def renew_packing(self, packed: PackedSteps) -> None:
        """Go on with other packed layers, since the weights may have changed."""
        self._packed = packed

    def _begin_like(self, alone: Runner) -> None:
        """Lay steps out as the runner of the first prompt does; positions count from each text."""
        self._cache, self._kinds = self._texts, alone._kinds
        first = torch.zeros_like(alone._next_position)  # [..., 1, 1]
        shape = *first.shape[:-2], self.num_rows, 1
        self._next_position = first.expand(shape)
        self._layout = BlockLayout(
            self.model, self._texts, self._kinds, alone._extras, self._next_position
        )
