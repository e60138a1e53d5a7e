"""What a step reads on the device: positions, and with its draft the lengths of rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from lookahead_hf.block.block import ancestor_words
from lookahead_hf.cache.slots import ColumnCache, SlotGroup
from lookahead_hf.draft import DraftTree
from lookahead_hf.rows import Rows
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

    Args:
        rows: The texts.
        draft: What is fed behind the last tokens.
        lengths: Tokens of each row in the cache, [rows].
        width: Tokens per row, padding included.
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
    """Round up, so that the next field begins at a multiple of 16 bytes.

    For another address Triton compiles kernels of their own.
    """
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
