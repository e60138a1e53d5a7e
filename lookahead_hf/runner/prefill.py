"""Runs the prompt of one call and takes over its cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lookahead_hf import compat
from lookahead_hf.cache.adopt import AdoptedCache
from lookahead_hf.cache.columns import ColumnCache
from lookahead_hf.call import execution
from lookahead_hf.draft import DraftTree
from lookahead_hf.model import compiled, numerics, position_limits, prefix_tuning
from lookahead_hf.model.facts import facts_of
from lookahead_hf.model_state import state_of
from lookahead_hf.patches.layers import CompiledSteps
from lookahead_hf.runner import masks, passthrough_kwargs, prompts
from lookahead_hf.runner.layout import BlockLayout, BlockShape
from lookahead_hf.runner.outputs import StepOutputs
from lookahead_hf.runner.recurrent import RecurrentLayers


class PromptRunner(ABC):
    """The part of a runner that comes before the steps.

    Attributes:
        execution: How steps ran, as in `SpeculativeStats`.
        num_fed: Tokens that the model was fed, padding included.
        by_kernel: Counts attentions by whether our kernel did them, if the shape of blocks asks for
            it everywhere; else None.
        only_chains: Whether drafts must be chains, because of recurrent states.
        recurrent: The layers with such states, None without any or before the prompt.
        is_flat: Whether blocks are flat, see `runner.flat`.
    """

    execution: str | None = execution.MODEL
    num_fed = 0

    def __init__(
        self,
        model: Any,
        num_rows: int,
        shape: BlockShape | None = None,
        steps: CompiledSteps | None = None,
        flat: bool = False,
    ) -> None:
        """Prepare for one call.

        Args:
            model: The target.
            num_rows: Rows of the batch.
            shape: The shape of every block, None to fit each draft.
            steps: How steps run the layers on a CPU, None for their own code.
            flat: Whether blocks are flat.
        """
        self.model = model
        self.num_rows = num_rows
        self._cache: ColumnCache | None = None
        self._shape, self._is_compiled = shape, compiled.is_compiled(model)
        self.by_kernel = Counter[bool]() if shape is not None and shape.by_kernel else None
        self.is_flat = flat
        self._steps = steps
        self._is_nan_alone = np.zeros(num_rows, bool)  # in cleared slots and without a draft
        self._is_repeat = self._is_new = False
        self._names = compat.decoder_names(model)
        self._extras: dict[str, Any] = {}
        self._kinds = masks.of_model(model)
        self.only_chains = bool(facts_of(model).mixers)
        self.recurrent: RecurrentLayers | None = None
        if self.only_chains and model.device.type == "cuda":
            self.execution = execution.STATES
        self._mask_dict = compat.takes_mask_dict(model)

    @property
    def ways(self) -> dict[str, Any]:
        """How steps ran, as fields of `SpeculativeStats`."""
        if self._steps is None:
            return {"execution": self.execution}
        own_code = tuple(sorted(self._steps.reasons))
        return {"execution": self.execution, "layers": self._steps.counts, "own_code": own_code}

    @property
    def has_one_shape(self) -> bool:
        """Whether all blocks have the same shape."""
        return self._shape is not None

    @property
    def has_cache(self) -> bool:
        """Whether the prompt was run and its cache taken over."""
        return self._cache is not None

    @property
    def cache(self) -> ColumnCache:
        """The cache, which `prefill` or `start` takes over."""
        assert self._cache is not None
        return self._cache

    def prefill(
        self,
        input_ids: torch.Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        before_steps: Callable[[], object] = lambda: None,
    ) -> Any:
        """Run the prompt as plain `generate` does and take over its cache.

        Args:
            input_ids: Prompt tokens, [rows, columns].
            generation_config: As prepared by `generate`.
            model_kwargs: As prepared by `generate`.
            before_steps: Called after the forward, before the steps are prepared.

        Returns:
            The forward's outputs.
        """
        virtual = prefix_tuning.of_model(self.model).count
        attended = prompts.attended_columns(model_kwargs.get(self._names.mask), virtual)
        self._extras = passthrough_kwargs.passed_on(model_kwargs, self._names)
        position_ids = position_limits.of_prompt(self.model, input_ids, model_kwargs)
        assert position_ids is not None
        given = model_kwargs.get("past_key_values")
        facts = self.model, generation_config, model_kwargs
        if self.is_flat and attended is not None and prompts.may_leave_padding(attended, *facts):
            self._take_over(given, attended, position_ids, is_fed=True)
            outputs: Any = self._read(input_ids.numpy(), attended)
            before_steps()
            return outputs
        before = 0 if given is None else int(given.get_seq_length())
        outputs = compat.prefill(self.model, input_ids, generation_config, model_kwargs)
        before_steps()
        cache = outputs[self._names.cache]
        returned = compat.is_users_cache(cache) or bool(generation_config.return_dict_in_generate)
        self._take_over(cache, attended, position_ids, returned)
        self.num_fed += self.num_rows * (self.cache.num_columns - before)
        return outputs

    def _read(self, ids: np.ndarray, attended: np.ndarray) -> StepOutputs:
        """Read prompts, [rows, columns], without their pads, into an empty cache."""
        self.cache.slots.reserve(int(attended.sum(1).max()))
        rows = [row[seen] for row, seen in zip(ids, attended, strict=True)]
        step = self.run(rows, DraftTree.empty(self.num_rows), is_prompt=True)
        self.keep(np.ones(self.num_rows, np.int64))
        return StepOutputs(logits=step.logits)

    def start(
        self,
        input_ids: torch.Tensor,
        cache: compat.Cache,
        mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> None:
        """Run a prompt outside of `generate`.

        Args:
            input_ids: Its tokens, [rows, columns].
            cache: An empty cache.
            mask: 1 for attended tokens, [rows, columns]; None if all are.
            position_ids: Their positions, [..., rows, columns]; None to count by the mask.
        """
        if position_ids is None:
            seen = torch.ones_like(input_ids) if mask is None else mask
            position_ids = compat.positions_by_mask(seen)
        given = {self._names.ids: input_ids, self._names.cache: cache}
        if self._names.positions is not None:
            given[self._names.positions] = position_ids
        attended = None
        if mask is not None:
            given[self._names.mask] = mask
            attended = mask.to("cpu").numpy().astype(bool)
        outputs = self.model(**given, use_cache=True, return_dict=True)
        self._take_over(outputs[self._names.cache], attended, position_ids)

    def _take_over(
        self,
        cache: compat.Cache,
        attended: np.ndarray | None,  # [rows, columns]
        position_ids: torch.Tensor,  # [..., rows, columns], or a single row for all
        returned: bool = False,
        is_fed: bool = False,
    ) -> None:
        by_columns = is_fed or self._names.cache == "cache_params"
        self._cache = adopted = AdoptedCache(
            *(cache, attended, self.num_rows, compat.layer_masks(self.model), self._trims),
            returned=returned,
            num_columns=position_ids.shape[-1] if by_columns else None,
            is_fed=is_fed,
        )
        copies = state_of(self.model).needs_copies
        key = numerics.of_model(self.model), self.is_flat
        self.cache.slots.extent.copies = bool(copies) and key in copies
        self._kinds = [kind.within(adopted.seen[kind.name]) for kind in self._kinds]
        if self._shape is not None:
            self.cache.slots.fix(self.cache.slots.longest + self._shape.room)
        position_ids = position_ids.expand(*position_ids.shape[:-2], self.num_rows, -1)
        self._next_position = position_ids[..., -1:] + 1  # [..., rows, 1]
        if self.only_chains:
            by_token, slots = self._shape is not None, self.cache.slots
            self.recurrent = RecurrentLayers(self.model, slots, self.num_rows, by_token)
        self._layout = BlockLayout(
            *(self.model, self.cache, self._kinds, self._extras, self._next_position),
            position_ids.numpy() if self.is_flat else None,
        )

    @property
    def _trims(self) -> bool:
        """Whether layers with a window hold no more than that."""
        return self._shape is None and not self._is_compiled

    @abstractmethod
    def run(
        self, fed: Sequence[np.ndarray], draft: DraftTree, is_prompt: bool = False
    ) -> StepOutputs:
        """Run a flat block."""

    @abstractmethod
    def keep(self, counts: np.ndarray) -> None:
        """Keep the first tokens of the latest block in every row, [rows]."""
