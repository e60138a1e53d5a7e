"""Runs the model for texts that come and go: prompts alone, steps together."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lookahead_hf.cache.refilled import RefilledCache
from lookahead_hf.generation.call import PreparedCall
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.layout import BlockLayout
from lookahead_hf.runner.packed_steps import PackedSteps


class RefilledRunner(Runner):
    """A runner that takes a new prompt into a free row."""

    def __init__(self, model: object, num_rows: int, packed: PackedSteps, flat: bool) -> None:
        """Prepare for the requests of one run.

        Args:
            model: The target.
            num_rows: Rows of the steps.
            packed: How steps and prompts use packed linear layers.
            flat: Whether steps feed the tokens of live rows alone.
        """
        super().__init__(model, num_rows, None, packed, flat)
        self._texts = RefilledCache(num_rows)

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
