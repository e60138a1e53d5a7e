"""The data that kernels take and return."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch

MAX_ATTENTION_NODES = 64
"""Nodes of a row in `tree_attention`, node 0 included: one bit each in the ancestor words."""

MAX_HEAD_DIM = 256  # Largest head of `tree_attention`


class PathTable:
    """Tensors `[batch, slot, ...]` in whose slots `compact_path` moves tokens.

    It holds addresses: a layer that was reallocated needs a new table. Head sizes, dtypes,
    capacities and devices may differ. A token's values lie in one piece of memory.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        devices = list(dict.fromkeys(tensor.device for tensor in self.tensors))
        self._parts: list[PathTable] | None = None  # itself would be a circle that holds memory
        if len(devices) != 1:
            self._parts = [
                PathTable([tensor for tensor in self.tensors if tensor.device == device])
                for device in devices
            ]

    @property
    def by_device(self) -> list[PathTable]:
        """One table per device: this one if there is only one device."""
        return [self] if self._parts is None else self._parts

    @cached_property
    def word_bytes(self) -> int:
        """Size of the words in which the tokens of all tensors can be moved, at most 4 bytes."""
        return next(size for size in (4, 2, 1) if self._divisible_by(size))

    @cached_property
    def aligned(self) -> bool:
        """Whether every token begins at a multiple of 16 bytes and has such a length."""
        return self._divisible_by(16)

    @cached_property
    def words(self) -> torch.Tensor:
        """Address, row stride, slot stride and token width of every tensor, [tensors, 4] int64.

        Strides and widths count words of `word_bytes`.
        """
        layout = [
            [address] + [size // self.word_bytes for size in sizes]
            for address, *sizes in self._bytes
        ]
        return torch.tensor(layout, dtype=torch.int64, device=self.tensors[0].device)

    @cached_property
    def max_words(self) -> int:
        """Words of the widest token."""
        return max(width for *_, width in self._bytes) // self.word_bytes

    @cached_property
    def _bytes(self) -> list[tuple[int, int, int, int]]:
        layout = []
        for tensor in self.tensors:
            size, token = tensor.element_size(), tensor[0, 0]
            assert token.is_contiguous(), "a token's values must lie in one piece of memory"
            strides = tensor.stride(0) * size, tensor.stride(1) * size
            layout.append((tensor.data_ptr(), *strides, token.numel() * size))
        return layout

    def _divisible_by(self, size: int) -> bool:
        return all(number % size == 0 for sizes in self._bytes for number in sizes)


class RowScan(NamedTuple):
    """One pass over logits; verification reads `best`, and `topk_rows` reads everything."""

    # Greatest entry of every tile, packed by `_common.pack`, [rows, nodes, tiles] int64
    best: torch.Tensor
    # Order keys of the greatest entries of `PART` entries each, [rows, nodes, parts] int32; a tile
    # has a whole number of parts.
    parts: torch.Tensor
    # `sum(exp(entry - greatest entry))` of every tile, [rows, nodes, tiles] float32
    sums: torch.Tensor


class TopKCounts(NamedTuple):
    """How many entries `topk_rows` finds for which nodes of a step's trees."""

    # `TreeWalk.packed`, [rows, 2 + width] int64; all k are found where a path ends.
    walk: torch.Tensor
    # Drafted nodes of each row, behind which there is padding, [rows] integers
    num_nodes: torch.Tensor
    few: int  # entries to find at all other nodes, at most k


class TopRows(NamedTuple):
    """The best entries of every row."""

    values: torch.Tensor  # best first, [rows, k] float32
    ids: torch.Tensor  # their token ids, [rows, k] int64
    log_sum: torch.Tensor  # `logsumexp` of the whole row, [rows] float32


class TreeWalk(NamedTuple):
    """The accepted path of every row.

    Node 0 is the row's last token, node `1 + i` its drafted node `i`. A path begins with node 0, so
    `path[:, i]` belongs `i` slots behind the row's last token, and a row keeps `num_accepted + 1`
    of the tokens that were fed.
    """

    # `num_accepted`, `bonus` and `path` side by side, [rows, 2 + 1 + nodes] int64: all that the
    # host needs
    packed: torch.Tensor
    # Token chosen at each node, -1 where a row has no such node, [rows, 1 + nodes] int64; None
    # where tokens are not chosen at every node.
    best: torch.Tensor | None = None
    scan: RowScan | None = None  # a kernel's pass over the scores, if it was to be kept

    @property
    def num_accepted(self) -> torch.Tensor:
        """Accepted nodes of each row, node 0 not counted, [rows] int64."""
        return self.packed[:, 0]

    @property
    def bonus(self) -> torch.Tensor:
        """The target's own token after the last accepted node, [rows] int64."""
        return self.packed[:, 1]

    @property
    def path(self) -> torch.Tensor:
        """Node 0 and the accepted nodes from the root down, then -1, [rows, 1 + nodes] int64."""
        return self.packed[:, 2:]
