"""A step as a function of tensors that keep their addresses, so that a graph can replay it."""

from __future__ import annotations

from typing import Any

import torch

from lookahead_hf import kernels
from lookahead_hf.block.block import Block, Held, is_read, kernel_serves
from lookahead_hf.block.layout import PromptState, widened
from lookahead_hf.cache.slots import SlotGroup
from lookahead_hf.engines.cuda.state import DraftViews, GroupState, StepState
from lookahead_hf.kernels import TreeWalk
from lookahead_hf.model import compat
from lookahead_hf.runner.forward import ForwardContext, running


class StepFunction:
    """The step of one model over one cache.

    Attributes:
        reads_masks: Whether a layer read a mask in the latest forward; true before the first one.
    """

    reads_masks = True

    def __init__(
        self,
        model: Any,
        beginning: PromptState,
        state: StepState,
    ) -> None:
        self._model, self._cache, self._state = model, beginning.cache, state
        self._passed, self._kinds = beginning.passed, beginning.kinds
        self._names = beginning.names
        self._takes_dict = compat.takes_mask_dict(model)

    def run(self, width: int, visible: int) -> tuple[Any, ...]:
        """Run a whole step that chooses the likeliest tokens.

        Args:
            width: Tokens per row, at most `MAX_WIDTH`.
            visible: Slots that the attention sees.

        Returns:
            What `forward` returns, `TreeWalk.packed`, and the tensors of the kernel's `RowScan` of
            the logits, if there is one.
        """
        logits, states = self.forward(width, visible)
        done = self.decide(width, logits, keep_scan=True)
        return (logits, states, done.packed, *(done.scan or ()))

    def forward(self, width: int, visible: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Build masks and positions and run the model.

        Returns:
            Logits, [rows, width, vocab], and the last hidden states, [rows, width, hidden], if a
            drafter reads them.
        """
        state, draft = self._state, self._state.draft(width)
        fed = draft.lengths - state.prompt_lengths
        fed = fed.minimum((fed * draft.live).max())  # an ended text may have filled a table
        on_kernel = kernel_serves(draft.tokens.device, width)
        block = Block(
            draft.parents,
            (draft.lengths + state.pads)[:, None] + draft.depth,
            state.pads,
            self._hold(draft, visible),
            self._model.dtype,
            given_words=draft.bits,
            for_kernel=on_kernel,
            by_length=self._cache.slots.extent.shown is None,
        )
        built = block.make_masks(is_causal=False, lazy=on_kernel)
        inputs = {
            **widened(self._passed, width),
            "input_ids": draft.tokens,
            "position_ids": state.next_position + (fed[:, None] + draft.depth),
            "attention_mask": built if self._takes_dict else next(iter(built.values())),
            self._names.cache: self._cache.slots,
            "use_cache": True,
        }
        experts = compat.set_up_for_step(self._model, len(draft.tokens), width)
        context = ForwardContext(block)
        with experts, running(context, draft.tokens.device):
            outputs = self._model(**inputs, return_dict=True)
        self.reads_masks = any(is_read(mask) for mask in built.values())
        return outputs.logits, compat.last_hidden_states(outputs)

    def num_nodes(self, width: int) -> torch.Tensor:
        """Return the drafted nodes of each row of the step, [rows]."""
        return self._state.draft(width).num_nodes

    def try_masks(self, width: int, visible: int) -> bool:
        """Return whether a layer reads a mask: shown by a forward, if the kernel may attend."""
        if kernel_serves(self._state.draft(width).tokens.device, width):
            self.forward(width, visible)
        return self.reads_masks

    def decide(
        self,
        width: int,
        scores: torch.Tensor,  # [rows, width, vocab]
        noise: torch.Tensor | None = None,  # [rows, depths, vocab]
        keep_scan: bool = False,
    ) -> TreeWalk:
        """Walk down the tree, and keep the accepted path in the cache."""
        draft = self._state.draft(width)
        tree = draft.tokens, draft.parents, draft.num_nodes
        depth = None if noise is None else draft.depth
        done = kernels.verify_tree(scores, *tree, noise, depth, keep_scan=keep_scan)
        kept = done.num_accepted + 1
        for group, part in self._groups if width > 1 else ():
            lengths = _lengths(group, part, draft)
            kernels.compact_path(group.path_table, lengths, done.path, kept)
        return done

    @property
    def _groups(self) -> list[tuple[SlotGroup, GroupState]]:
        return [*zip(self._cache.slots.each_group(), self._state.groups, strict=True)]

    def _hold(self, draft: DraftViews, visible: int) -> dict[str, Held]:
        """Place the block in every group of layers; return what they hold, by kind of mask."""
        rows, width = draft.tokens.shape
        place = torch.arange(width, device=draft.tokens.device)
        row = torch.arange(rows, device=place.device)[:, None]
        held = dict[str, Held]()
        for group, part in self._groups:
            lengths, seen = _lengths(group, part, draft), min(visible, group.capacity)
            flat = row * group.capacity + lengths[:, None] + place
            group.place_at(flat.reshape(-1), seen)
            pads = self._state.pads if group.window is None else self._state.pads + part.dropped
            for kind in self._kinds:
                if self._cache.slots.groups[kind.name] is group:
                    columns = part.columns if kind.is_limited else None
                    held[kind.name] = Held(kind, lengths, seen, pads, columns)
        return {kind.name: held[kind.name] for kind in self._kinds}


def _lengths(group: SlotGroup, part: GroupState, draft: DraftViews) -> torch.Tensor:
    """Return the used slots of each row in a group of layers, [rows]."""
    return draft.lengths if group.window is None else draft.lengths - part.dropped
