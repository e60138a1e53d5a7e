"""Runs the model of one call: the prompt, then blocks of draft tokens, kept or rolled back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from lookahead_hf import compat
from lookahead_hf.cache.adopt import AdoptedCache
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.model_state import state_of
from lookahead_hf.rows import Rows
from lookahead_hf.runner import (
    attention,
    execution,
    implicit_positions,
    masks,
    non_finite,
    passthrough_kwargs,
    positions,
    prefix_tuning,
    prompts,
    torch_compile,
)
from lookahead_hf.runner.layout import BlockInputs, BlockLayout, BlockShape
from lookahead_hf.runner.outputs import StepOutputs
from lookahead_hf.runner.packed_steps import PackedSteps
from lookahead_hf.runner.recurrent.layers import RecurrentLayers


class Runner:
    """Runs a model with ragged rows, in a cache that it takes over for the length of a call.

    Attributes:
        execution: How the steps were run, as in `SpeculativeStats`.
        num_fed: Tokens that the model was fed, padding included.
        most_nodes: Most nodes that a row's draft can have, None for any number.
        only_chains: Whether drafts must be chains, as a recurrent state has one past.
        recurrent: The layers that keep such a state, None without any or before the prompt.
        is_flat: Whether blocks hold the tokens of live rows alone, without padding.
    """

    execution: str | None = execution.MODEL
    most_nodes: int | None = None
    num_fed = 0

    def __init__(
        self,
        model: Any,
        num_rows: int,
        shape: BlockShape | None = None,
        packed: PackedSteps | None = None,
        flat: bool = False,
    ) -> None:
        """Prepare for one call.

        Args:
            model: The target.
            num_rows: Rows of the batch.
            shape: The shape of every block, None for as large as each draft needs.
            packed: How steps use packed linear layers, None where they do not.
            flat: Whether the model and the call admit flat blocks.
        """
        self.model = model
        self.num_rows = num_rows
        self._cache: AdoptedCache | None = None
        self._shape, self._is_compiled = shape, torch_compile.is_compiled(model)
        self.is_flat = flat
        packed = None if self._is_compiled else packed
        self._packed = packed or PackedSteps(model, False)
        self._is_nan_alone = np.zeros(num_rows, bool)  # in cleared slots and without a draft
        self._is_repeat = self._is_new = False
        self._names = compat.decoder_names(model)
        self._extras: dict[str, Any] = {}
        self._kinds = masks.of_model(model)
        self.only_chains = bool(compat.mixers(model))
        self.recurrent: RecurrentLayers | None = None
        if self.only_chains and model.device.type == "cuda":
            self.execution = execution.STATES
        self._mask_dict = compat.takes_mask_dict(model)

    @property
    def has_cache(self) -> bool:
        """Whether the prompt was run and its cache taken over."""
        return self._cache is not None

    @property
    def cache(self) -> AdoptedCache:
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
        position_ids = positions.of_prompt(self.model, input_ids, model_kwargs)
        assert position_ids is not None
        given = model_kwargs.get("past_key_values")
        facts = self.model, generation_config, model_kwargs
        if self.is_flat and attended is not None and prompts.may_leave_padding(attended, *facts):
            self._take_over(given, attended, position_ids, is_fed=True)
            outputs: Any = self._read(input_ids.numpy(), attended)
            before_steps()
            return outputs
        before = 0 if given is None else int(given.get_seq_length())
        with self._packed.prefill():
            outputs = compat.prefill(self.model, input_ids, generation_config, model_kwargs)
        before_steps()
        cache = outputs[self._names.cache]
        returned = compat.is_users_cache(cache) or bool(generation_config.return_dict_in_generate)
        self._take_over(cache, attended, position_ids, returned)
        self.num_fed += self.num_rows * (self.cache.num_columns - before)
        return outputs

    def _read(self, ids: np.ndarray, attended: np.ndarray) -> StepOutputs:
        """Read prompts, [rows, columns], without their pads, into a cache that lacks them."""

        def run(pieces: list[np.ndarray]) -> torch.Tensor:
            step = self.run(pieces, DraftTree.empty(self.num_rows), is_prompt=True)
            self.keep(np.array([min(len(piece), 1) for piece in pieces]))
            return step.logits

        self.cache.slots.reserve(int(attended.sum(1).max()))
        rows = [row[seen] for row, seen in zip(ids, attended, strict=True)]
        return StepOutputs(logits=prompts.read(rows, run))

    def start(
        self, input_ids: torch.Tensor, cache: compat.Cache, mask: torch.Tensor | None = None
    ) -> None:
        """Run a prompt outside of `generate`.

        Args:
            input_ids: Its tokens, [rows, columns].
            cache: An empty cache.
            mask: 1 for what is attended, [rows, columns]; None for everything.
        """
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
        position_ids: torch.Tensor,  # [..., rows, columns]
        returned: bool = False,
        is_fed: bool = False,
    ) -> None:
        by_columns = is_fed or self._names.cache == "cache_params"
        self._cache = AdoptedCache(
            *(cache, attended, self.num_rows, compat.layer_masks(self.model), self._trims),
            returned=returned,
            num_columns=position_ids.shape[-1] if by_columns else None,
            is_fed=is_fed,
        )
        self.cache.slots.extent.copies = state_of(self.model).needs_copies
        self._kinds = [kind.within(self.cache.seen[kind.name]) for kind in self._kinds]
        if self._shape is not None:
            self.cache.slots.fix(self.cache.slots.longest + self._shape.room)
        self._next_position = position_ids[..., -1:] + 1  # [..., rows, 1]
        if self.only_chains:
            by_token, slots = self._shape is not None, self.cache.slots
            self.recurrent = RecurrentLayers(self.model, slots, self.num_rows, by_token)
        self._layout = BlockLayout(
            *(self.model, self.cache, self._kinds, self._extras, self._next_position),
            position_ids.numpy() if self.is_flat else None,
        )

    @property
    def mode(self) -> str:
        """How steps are run now, "packed" or "": their cost depends on it."""
        return execution.PACKED if self._packed.is_used else ""

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Nodes per row that drafts are padded to, from 0 on; None if a block is like its draft."""
        is_padded = self._is_compiled and self._shape is None
        return node_counts(torch_compile.WIDTHS) if is_padded else None

    @property
    def step_is_typical(self) -> bool:
        """Whether the latest step was one forward and nothing else, so that its time is typical.

        The first block of a size takes up to a fifth longer: oneDNN prepares its kernels for it.
        """
        return self._packed.is_typical and not self._is_repeat and not self._is_new

    @property
    def _trims(self) -> bool:
        """Whether layers with a window hold no more than that."""
        return self._shape is None and not self._is_compiled

    def launch(self, rows: Rows, draft: DraftTree) -> StepOutputs:
        """Lay out a step and run it.

        Args:
            rows: The texts.
            draft: The draft behind their last tokens.

        Returns:
            Its outputs; the logits are [rows, 1 + most nodes or more, vocab].
        """
        if not self.is_flat:
            return self.forward(self.layout(rows, draft))
        last, live = rows.last_tokens, rows.live.tolist()
        return self.run([last[r : r + 1] if live[r] else last[:0] for r in range(len(live))], draft)

    def run(
        self, fed: Sequence[np.ndarray], draft: DraftTree, is_prompt: bool = False
    ) -> StepOutputs:
        """Run a flat block: any tokens of any rows, whether of prompts or behind them.

        Of what a row was fed, all tokens but the last are kept in the cache at once. `commit` keeps
        the last one with the accepted path if the row emits a token. Where it emits none, since its
        prompt goes on, `keep` does, or the next block feeds the token again.

        Args:
            fed: As in `BlockLayout.flat`.
            draft: The draft behind these tokens.
            is_prompt: Whether all of them are of prompts, which are read with plain's bits.

        Returns:
            Its outputs; the logits are [rows, 1 + most nodes, vocab].
        """
        step = self.forward(self._layout.flat(fed, draft), is_prompt)
        self.keep(np.array([max(len(tokens) - 1, 0) for tokens in fed]))
        return step

    def layout(self, rows: Rows, draft: DraftTree) -> BlockInputs:
        """Give every token of the block its slot, column, position and mask."""
        width = 1 + draft.max_nodes
        if self._shape is not None:
            width = max(width, self._shape.width)
        elif self._is_compiled:
            width = torch_compile.width_for(width)
            torch_compile.make_room(self.cache.slots, self.cache.slots.longest + width)
        tokens, _, depths = draft.padded(width, rows.last_tokens)
        return self._layout.block(tokens, depths, draft, _ahead(rows))

    def forward(self, inputs: BlockInputs, is_prompt: bool = False) -> StepOutputs:
        """Run the model on a block; its logits are [rows, width, vocab]."""
        remembers = nullcontext() if self.recurrent is None else self.recurrent.step()
        given, device = inputs.model_inputs, self._next_position.device
        experts = compat.set_up_for_step(self.model, *given[self._names.ids].shape)
        linears = self._packed.prefill() if is_prompt else self._packed.step()
        in_step = attention.step(device, inputs.trees, inputs.flat)
        with in_step, implicit_positions.step(inputs.columns), remembers, experts, linears:
            outputs = self.model(**given, return_dict=True)
        if self._packed.is_used:
            self.execution = execution.PACKED
        self.num_fed += inputs.num_tokens
        kind = self.mode, inputs.num_tokens, inputs.flat is not None
        known = state_of(self.model).run_blocks
        self._is_new = kind not in known
        known.add(kind)
        logits, states = outputs.logits, compat.last_hidden_states(outputs)
        if inputs.flat is not None:
            logits = inputs.flat.of_rows(logits)
            states = states if states is None else inputs.flat.states_of_rows(states)
        return StepOutputs(logits=logits, of_model=outputs, hidden_states=states)

    def is_contaminated(self, step: StepOutputs, live: np.ndarray) -> bool:
        """Whether a draft may have made NaN of the logits of a live row, [rows] bool."""
        self._is_repeat = False
        return bool(((self._has_nan(step) > 0) & live & ~self._is_nan_alone).any())

    def repeat_without_draft(self, rows: Rows) -> StepOutputs:
        """Run a step again from its last tokens alone, in slots that no draft has written."""
        non_finite.clear(self.cache.slots)
        step = self.launch(rows, DraftTree.empty(self.num_rows))
        self._is_nan_alone |= self._has_nan(step) > 0
        self._is_repeat = True
        return step

    def _has_nan(self, step: StepOutputs) -> np.ndarray:
        """Count NaN in a sample of the logits of each row, [rows]."""
        found: np.ndarray = non_finite.has_nan(step.logits).cpu().numpy()
        return found

    def commit(self, verdict: Verdict) -> int:
        """Keep each live row's last token and accepted path in the cache, and nothing else.

        Returns:
            Accepted tokens whose K and V had to be moved.
        """
        accepted = verdict.num_accepted
        moved = self._close_gaps(verdict, accepted) if len(verdict.path) else 0
        self.keep(np.where(verdict.num_emitted > 0, accepted + 1, 0))
        return moved

    def _close_gaps(self, verdict: Verdict, accepted: np.ndarray) -> int:
        """Move the accepted paths together, unless they are chains already."""
        identity = np.arange(1 + int(accepted.max()))
        path = np.tile(identity, (self.num_rows, 1))
        for row, count in enumerate(accepted.tolist()):
            path[row, 1 : 1 + count] = verdict.accepted(row) + 1
        moved = int((path != identity).sum())
        if moved:
            self.cache.slots.compact(path, accepted + 1)
        return moved

    def end(self) -> None:
        """End the call; its cache was handed back, or nobody needs it."""

    def hand_back(self, num_fed: int) -> compat.Cache:
        """Return the cache as plain leaves it after `num_fed` tokens behind the prompt.

        A recurrent state cannot go back. If a row has gone further, or an exception left the layers
        apart, the cache is returned empty, and a later call on it reads the text again.
        """
        cache = self.cache
        if self.recurrent is not None:
            if not self.recurrent.are_at(num_fed):
                return cache.emptied(compat.empty_cache(self.model))
            self.recurrent.settle()
        return cache.hand_back(cache.num_columns + num_fed)

    @property
    def fed(self) -> np.ndarray:
        """Tokens behind the prompt that each row has in the cache, [rows]."""
        return self.cache.slots.lengths - (self.cache.num_columns - self.cache.pads)

    def feed(self, tokens: list[list[int]], ahead: np.ndarray) -> StepOutputs:
        """Run further tokens of every row in one forward; `keep` then keeps them in the cache.

        Args:
            tokens: Tokens per row, the last token of the row first; rows may have none.
            ahead: Tokens of each row that were fed since the prompt, [rows].
        """
        width = max(map(len, tokens))
        block = np.zeros((self.num_rows, width), np.int64)
        for row, fed in enumerate(tokens):
            block[row, : len(fed)] = fed
            block[row, len(fed) :] = fed[-1] if fed else 0  # padding, as in `layout`
        draft = DraftTree.from_chains([[row[1:]] for row in tokens])
        return Runner.forward(self, self._layout.block(block, draft.padded(width)[2], draft, ahead))

    def keep(self, counts: np.ndarray) -> None:
        """Keep the first tokens of the latest block in every row, [rows]."""
        if self.recurrent is not None:
            self.recurrent.keep(counts)
        self.cache.slots.lengths += counts


def node_counts(widths: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many nodes blocks of these widths hold beside the last token, the fewest first."""
    return tuple(sorted(width - 1 for width in widths))


def _ahead(rows: Rows) -> np.ndarray:
    """Tokens of each row that were fed since the prompt, [rows].

    The last token of a text that has ended may be the end of a table of positions.
    """
    ahead = rows.num_fed
    return np.minimum(ahead, ahead[rows.live].max(initial=0))
