"""The lengths of rows, and a layer's K and V, which the parts of a cache share.

A cache refers to its layers and groups, and both refer to these; nothing refers to the cache. So K
and V are freed at once, without Python's garbage collector.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(eq=False)
class Extent:
    """The slots of every row that are in use, and those that the attention reads.

    Attributes:
        lengths: Tokens of each row that are kept, [rows] int64.
        shown: Slots that the attention sees in every forward, None for those in use.
        starts: Lengths after the prompt, [rows], if all rows may be handed back where the slowest
            one is, so that each must keep what that row sees; else None.
        copies: Whether the model needs K and V contiguous.
    """

    lengths: np.ndarray
    shown: int | None = None
    starts: np.ndarray | None = None
    copies: bool = False

    @property
    def longest(self) -> int:
        """Length of the longest row."""
        return int(self.lengths.max())

    @property
    def lead(self) -> np.ndarray | int:
        """Tokens that each row keeps beyond its window, [rows] int64."""
        if self.starts is None:
            return 0
        fed = self.lengths - self.starts
        return fed - int(fed.min())


@dataclass(eq=False)
class Stores:
    """K and V of a layer, [rows, slots, kv_heads, head_dim] each; head sizes may differ.

    `dropped`, [rows] int64, counts the tokens of each row that came before its first slot.
    """

    k_store: torch.Tensor
    v_store: torch.Tensor
    dropped: np.ndarray

    @property
    def is_shaped(self) -> bool:
        """Whether the number and size of heads is known."""
        return bool(self.k_store.shape[2])

    def shape(self, capacity: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make room for K and V with heads like those of states, [any, kv_heads, any, dim] each."""
        for name, states in (("k_store", keys), ("v_store", values)):
            _, heads, _, dim = states.shape
            rows, dtype = self.k_store.shape[0], torch.promote_types(keys.dtype, states.dtype)
            vars(self)[name] = states.new_zeros(rows, capacity, heads, dim, dtype=dtype)

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` slots, first in K, then in V, to hold only one extra copy."""
        self.k_store = _grown(self.k_store, capacity)
        self.v_store = _grown(self.v_store, capacity)

    def drop(self, counts: np.ndarray) -> None:  # [rows]
        """Drop the oldest tokens of every row and move the others to the front.

        K, V and `dropped` are replaced together, so that an interrupt or lack of memory leaves a
        layer whole.
        """
        last, device = self.k_store.shape[1] - 1, self.k_store.device
        slots = torch.from_numpy(counts[:, None] + np.arange(last + 1)).clamp_(max=last)
        at = torch.arange(len(counts), device=device)[:, None], slots.to(device)
        vars(self).update(
            k_store=self.k_store[at], v_store=self.v_store[at], dropped=self.dropped + counts
        )


def _grown(store: torch.Tensor, capacity: int) -> torch.Tensor:
    """Copy the slots to room for `capacity`; the rest is zero, since masked NaN would spread."""
    if store.shape[1] >= capacity:
        return store
    grown = store.new_zeros(store.shape[0], capacity, *store.shape[2:])
    grown[:, : store.shape[1]].copy_(store)
    return grown
