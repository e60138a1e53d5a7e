"""The cache tensors of several layers, prepared once so that compaction is cheap in every step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch


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
