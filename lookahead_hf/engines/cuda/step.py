"""A step as a function of tensors that keep their addresses, so that a graph can replay it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from lookahead_hf import kernels
from lookahead_hf.block.block import Block, HeldSlots, ancestor_words, is_read, kernel_serves
from lookahead_hf.block.layout import PromptState, widened
from lookahead_hf.cache.slots import ColumnCache, SlotGroup
from lookahead_hf.draft import DraftTree
from lookahead_hf.kernels.data import TreeWalk
from lookahead_hf.model import compat
from lookahead_hf.rows import Rows
from lookahead_hf.runner.forward import ForwardContext, running
from lookahead_hf.runner.outputs import pinned

MAX_WIDTH = 64
"""Tokens per row of a block, the last one included: one bit each in the ancestor words."""


class DraftViews(NamedTuple):
    """A step's draft on the device, int64; node 0 is the row's last token."""

    tokens: torch.Tensor  # as of `DraftTree.padded`, and so are parents and depth, [rows, width]
    parents: torch.Tensor
    depth: torch.Tensor
    bits: torch.Tensor  # bit j: node j is an ancestor of the node or itself, [rows, width]
    num_nodes: torch.Tensor  # drafted nodes, [rows]
    live: torch.Tensor  # 1 for rows whose text goes on, else 0, [rows]
    lengths: torch.Tensor  # tokens of each row in the cache, [rows]


def pack(rows: Rows, draft: DraftTree, lengths: np.ndarray, width: int) -> np.ndarray:
    """Return a step's draft as one array, int64, of which `_views` are the fields.

    `lengths` are the tokens of each row in the cache, [rows]; `width` those fed, with padding.
    """
    assert width <= MAX_WIDTH, "a token has one bit in the words of the others"
    packed = np.zeros(_size(rows.num_rows, width), np.int64)
    fields = draft.padded(width, rows.last_tokens)
    words = ancestor_words(fields[1])
    values = *fields, words, np.diff(draft.row_offsets), rows.live, lengths
    for field, value in zip(_views(packed, rows.num_rows, width), values, strict=True):
        field[:] = value
    return packed


def _size(rows: int, width: int) -> int:
    return 4 * _even(rows * width) + 3 * rows


def _views(packed: Any, rows: int, width: int) -> list[Any]:
    """Return the fields of a packed draft, an array or a tensor, in the order of `DraftViews`."""
    tokens, field = rows * width, _even(rows * width)
    of_tokens = [packed[i * field :][:tokens].reshape(rows, width) for i in range(4)]
    return of_tokens + [packed[4 * field + i * rows :][:rows] for i in range(3)]


def _even(count: int) -> int:
    """Round up to 16 bytes; for another address Triton compiles kernels of their own."""
    return count + count % 2


class GroupState:
    """Tensors that say what the slots of a group of layers hold, changed in place.

    Attributes:
        dropped: Tokens of each row before its first slot, [rows] int64.
        columns: Column of the token in every slot, [rows, capacity] int64.
    """

    def __init__(self, pads: torch.Tensor) -> None:
        self.dropped, self.columns = torch.zeros_like(pads), pads.new_zeros(len(pads), 0)
        self._known: np.ndarray | None = None  # what `dropped` holds

    def fit(self, cache: ColumnCache, group: SlotGroup) -> None:
        """Take over a group's capacity and what it has dropped, where they have changed."""
        device, size = self.dropped.device, self.columns.shape[1]
        if self._known is group.dropped and size == group.capacity:
            return
        if size != group.capacity:
            with torch.inference_mode(False):  # later calls write to it outside of that
                self.columns = self.dropped.new_zeros(len(self.dropped), group.capacity)
        columns = cache.token_columns(group, group.capacity)
        self.columns.copy_(pinned(columns, device), non_blocking=True)
        self.dropped.copy_(pinned(group.dropped.copy(), device), non_blocking=True)
        self._known = group.dropped


class StepState:
    """Tensors that steps read, changed in place.

    Attributes:
        prompt_lengths: Tokens of each row in the cache after the prompt, [rows] int64.
        pads: Columns of the prompt that a row does not attend to, [rows] int64.
        next_position: Position of the token after the prompt, [..., rows, 1].
        groups: What the slots of each group of layers hold.
    """

    def __init__(self, cache: ColumnCache, next_position: torch.Tensor) -> None:
        device = next_position.device
        self.prompt_lengths = torch.zeros(len(cache.pads), dtype=torch.int64, device=device)
        self.pads, self.next_position = self.prompt_lengths.clone(), next_position.clone()
        self.groups = [GroupState(self.pads) for _ in cache.slots.each_group()]
        self._drafts: dict[int, torch.Tensor] = {}
        self.begin(cache, next_position)

    def begin(self, cache: ColumnCache, next_position: torch.Tensor) -> None:
        """Take over the values of a call whose rows and positions have the same shapes."""
        self.prompt_lengths.copy_(torch.from_numpy(cache.num_columns - cache.pads))
        self.pads.copy_(torch.from_numpy(np.array(cache.pads, np.int64)))
        self.next_position.copy_(next_position)
        self.fit(cache)

    def fit(self, cache: ColumnCache) -> None:
        """Take over capacities and dropped tokens of the cache, where they have changed."""
        for part, group in zip(self.groups, cache.slots.each_group(), strict=True):
            part.fit(cache, group)

    def draft(self, width: int) -> DraftViews:
        """Return the draft of a step of this width."""
        return DraftViews(*_views(self._draft(width), len(self.pads), width))

    def load(self, packed: np.ndarray, width: int) -> None:
        """Copy a packed draft to the device without waiting."""
        self._draft(width).copy_(pinned(packed, self.pads.device), non_blocking=True)

    def rehearse(self, width: int, lengths: np.ndarray) -> None:
        """Load a draft of this width without nodes, for rows of these lengths that are all live."""
        draft = self.draft(width)
        for field, value in zip(draft, (0, -1, 0, 1, 0, 1), strict=False):
            field.fill_(value)
        draft.lengths.copy_(torch.from_numpy(lengths))
        draft.bits.bitwise_left_shift_(torch.arange(width, device=draft.bits.device))

    def _draft(self, width: int) -> torch.Tensor:
        if width not in self._drafts:
            with torch.inference_mode(False):  # later calls write to it outside of that
                self._drafts[width] = self.pads.new_zeros(_size(len(self.pads), width))
        return self._drafts[width]


class StepFunction:
    """The step of one model over one cache.

    Attributes:
        reads_masks: Whether a layer read a mask in the latest forward; true before the first one.
    """

    reads_masks = True

    def __init__(self, model: Any, beginning: PromptState, state: StepState) -> None:
        self._model, self._cache, self._state = model, beginning.cache, state
        self._passed, self._kinds = beginning.passed, beginning.kinds
        self._names = beginning.names
        self._takes_dict = compat.takes_mask_dict(model)

    def run(self, width: int, visible: int) -> tuple[Any, ...]:
        """Run a whole step that chooses the likeliest tokens, at most `MAX_WIDTH` per row.

        Returns what `forward` returns, `TreeWalk.packed`, and the tensors of the kernel's `RowScan`
        of the logits, if there is one.
        """
        logits, states = self.forward(width, visible)
        done = self.decide(width, logits, keep_scan=True)
        return (logits, states, done.packed, *(done.scan or ()))

    def forward(self, width: int, visible: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Build masks and positions and run the model.

        Returns the logits, [rows, width, vocab], and the last hidden states, [rows, width, hidden],
        if a drafter reads them.
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

    def _hold(self, draft: DraftViews, visible: int) -> dict[str, HeldSlots]:
        """Place the block in every group of layers; return what they hold, by kind of mask."""
        rows, width = draft.tokens.shape
        place = torch.arange(width, device=draft.tokens.device)
        row = torch.arange(rows, device=place.device)[:, None]
        held = dict[str, HeldSlots]()
        for group, part in self._groups:
            lengths, seen = _lengths(group, part, draft), min(visible, group.capacity)
            flat = row * group.capacity + lengths[:, None] + place
            group.place_at(flat.reshape(-1), seen)
            pads = self._state.pads if group.window is None else self._state.pads + part.dropped
            for kind in self._kinds:
                if self._cache.slots.groups[kind.name] is group:
                    columns = part.columns if kind.is_limited else None
                    held[kind.name] = HeldSlots(kind, lengths, seen, pads, columns)
        return {kind.name: held[kind.name] for kind in self._kinds}


def _lengths(group: SlotGroup, part: GroupState, draft: DraftViews) -> torch.Tensor:
    """Return the used slots of each row in a group of layers, [rows]."""
    return draft.lengths if group.window is None else draft.lengths - part.dropped
