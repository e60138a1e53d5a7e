"""Describes once what the tokens of a forward see; each backend reads the form that it needs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from lookahead_hf import kernels
from lookahead_hf.kernels.data import MAX_ATTENTION_NODES
from lookahead_hf.model import compat

_OF_SHAPE = frozenset(
    {
        torch.Tensor.dim,
        torch.Tensor.size,
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("device", "dtype", "is_cuda", "ndim", "requires_grad", "shape")
        ),
    }
)
"""Properties that are read without building the mask."""


class LazyMask(torch.Tensor):
    """A mask that is built when a function of torch first reads it."""

    _make: Callable[[], torch.Tensor]
    made: torch.Tensor | None  # the mask, None before that
    _changes: int  # of the mask when it was made

    @staticmethod
    def of(
        make: Callable[[], torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> LazyMask:
        """Return a mask of this shape that `make` builds."""
        mask = compat.wrapper_tensor(LazyMask, shape, dtype, device)
        mask._make, mask.made = make, None
        return mask

    def _read(self) -> torch.Tensor:
        if self.made is None:
            self.made = self._make()
            self._changes = compat.num_changes(self.made)
        return self.made

    def stands_for(self, mask: Any) -> bool:
        """Return whether `mask` is this mask, as it was made."""
        if self.made is None:
            return mask is self
        is_ours = mask is self or mask is self.made
        return is_ours and compat.num_changes(self.made) == self._changes

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OF_SHAPE:
            return super().__torch_function__(func, types, args, kwargs or {})
        args, kwargs = compat.tree_map_only(LazyMask, LazyMask._read, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = compat.tree_map_only(LazyMask, LazyMask._read, (args, kwargs or {}))
        return func(*args, **kwargs)


def read_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a mask as layers read it."""
    return mask._read() if isinstance(mask, LazyMask) else mask


@dataclass(frozen=True, slots=True)
class MaskKind:
    """A kind of mask that the model takes, by transformers' name of the layer type."""

    name: str
    window: int | None = None  # columns, the token's own included
    chunk: int | None = None  # columns, counted from the row's first attended one

    @property
    def is_limited(self) -> bool:
        """Whether a token does not see all columns before its own."""
        return self.window is not None or self.chunk is not None

    def may_hide(self, last: int) -> bool:
        """Return whether a token up to the column `last` may not see all columns before it."""
        return self.chunk is not None or (self.window is not None and last >= self.window)

    def least_seen(self, query: Any, pads: Any) -> Any:
        """Return the least column that tokens in the columns `query` see.

        All are arrays or tensors that broadcast. `pads` counts the columns of the prompt that a row
        does not attend; those before the first attended one hold nothing.
        """
        if self.chunk is None:
            return query - self.window + 1
        return query - ((query - pads) % self.chunk).clip(None, (self.window or self.chunk) - 1)

    def within(self, kept: int | None) -> MaskKind:
        """Return this kind for a plain cache that keeps `kept` earlier columns, None for all."""
        if kept is None or self.window is not None:
            return self
        return replace(self, window=kept + 1)


def mask_kinds(model: Any) -> list[MaskKind]:
    """Return the masks that the model's layers need."""
    config = compat.text_config(model)
    limits = {
        "full_attention": {},
        "indexed_attention": {},
        "sliding_attention": {"window": getattr(config, "sliding_window", None)},
        "chunked_attention": {"chunk": getattr(config, "attention_chunk_size", None)},
    }
    names = [name for name in compat.mask_kinds(model) if name in limits]
    return [MaskKind(name, **limits[name]) for name in names]


def kernel_serves(device: torch.device, width: int) -> bool:
    """Return whether our kernel may attend blocks of this width on this device."""
    return kernels.backend(device) == "triton" and width <= MAX_ATTENTION_NODES


def is_read(mask: torch.Tensor | None) -> bool:
    """Return whether a mask exists: a lazy one does if somebody read it."""
    return mask is not None and (not isinstance(mask, LazyMask) or mask.made is not None)


class HeldSlots(NamedTuple):
    """What the layers of one kind hold when a forward begins."""

    kind: MaskKind  # the kind of their masks
    # Used slots of each row; its block is in the slots behind them, [rows] int64.
    lengths: torch.Tensor
    visible: int  # slots that the attention reads, at least as many as the longest row has tokens
    offsets: torch.Tensor  # column less slot of the tokens behind the prompt, [rows] int64
    # Columns of the tokens in the slots before the block, ascending within a row, [rows, visible or
    # more] int64; None if every token sees all of them.
    columns: torch.Tensor | None
    is_even: bool = False  # whether all rows are known to have used equally many slots
    group: Any = None  # the layers' part of the cache, None if nobody asks for it


@dataclass(eq=False)
class Block:
    """The tokens of rows behind what these have in the cache, `width` per row.

    A token sees its ancestors in the block, itself, and what its row held before, as far as the
    window or the chunk of a layer reaches.
    """

    parents: Any  # index of each token's parent in its row, -1 for none, [rows, width] int64
    query: torch.Tensor  # columns of the tokens, [rows, width] int64
    pads: torch.Tensor  # columns of the prompt that a row does not attend, [rows] int64
    held: Mapping[str, HeldSlots]  # what the layers hold, by the name of their masks' kind
    dtype: torch.dtype  # that of additive masks
    # Columns of the tokens in the slots, [rows, slots] int64, for a model that derives positions
    # from its cache; else None.
    slot_columns: torch.Tensor | None = None
    given_words: torch.Tensor | None = None  # `words`, if they are known already
    for_kernel: bool = False  # whether our attention kernel may serve the block
    # Whether that kernel divides a row's tokens among programs, not its slots. This is faster, but
    # the bits of a token then depend on the length of the row.
    by_length: bool = True
    # The masks that the model gets, by kind; None if not needed: each token sees all before it.
    masks: dict[str, torch.Tensor | None] = field(default_factory=dict, init=False)

    def make_masks(self, is_causal: bool, lazy: bool = False) -> dict[str, torch.Tensor | None]:
        """Make `masks`; with `lazy`, nothing is computed before somebody reads one.

        `is_causal` says that each token sees all tokens of its row's block before it, and nothing
        comes before the block or the block has one token.
        """
        rows, device = len(self.query), self.query.device
        own = weakref.proxy(self)  # a circle would keep K and V until Python looks for circles
        for name, held in self.held.items():
            make, shape = partial(Block.additive, own, name), (rows, 1, self.width, held.visible)
            # An indexer reads its mask, whatever there is to hide.
            if is_causal and held.columns is None and held.is_even and name != "indexed_attention":
                self.masks[name] = None
            else:
                self.masks[name] = LazyMask.of(make, shape, self.dtype, device) if lazy else make()
        return self.masks

    def kind_of(self, mask: torch.Tensor | None, group: Any = None) -> str | None:
        """Return the kind of a mask that a layer got, None if it is not ours or was changed.

        `group` is the layers' part of the cache, None for any.
        """
        for name, own in self.masks.items():
            is_own = own.stands_for(mask) if isinstance(own, LazyMask) else own is mask
            if is_own and (group is None or self.held[name].group is group):
                return name
        return None

    @property
    def parts(self) -> list[tuple[Block, np.ndarray, int]]:
        """Blocks of consecutive rows of the cache, the tokens of each row, and the first row."""
        return [(self, np.full(len(self.query), self.width), 0)]

    @property
    def width(self) -> int:
        """Tokens per row."""
        return self.query.shape[1]

    @property
    def is_chain(self) -> bool:
        """Whether each token is the child of the one before it."""
        return bool((self.parents == np.arange(self.width) - 1).all())

    @cached_property
    def words(self) -> torch.Tensor:
        """A word per token, with bits for tokens of its row that it sees, [rows, width] int64."""
        if self.given_words is not None:
            return self.given_words
        return torch.from_numpy(ancestor_words(self.parents)).to(self.query.device)

    @cached_property
    def seen(self) -> torch.Tensor:
        """Which tokens of its row's block each token sees, [rows, width, width] bool."""
        if self.given_words is not None:
            places = torch.arange(self.width, device=self.query.device)
            return (self.given_words[:, :, None] >> places & 1) == 1
        return torch.from_numpy(ancestors(self.parents)).to(self.query.device)

    @cached_property
    def distance(self) -> torch.Tensor:
        """Columns from every slot to every token, at least 0, [rows, width, slots]."""
        assert self.slot_columns is not None
        held = next(iter(self.held.values()))
        key = self._with_block(held, self.slot_columns, self.query)
        return (self.query[:, :, None] - key[:, None, :]).clamp(min=0)

    def additive(self, name: str) -> torch.Tensor:
        """Return the mask of a kind, [rows, 1, width, visible]: 0, the lowest number if unseen.

        Every backend takes this form; a bool mask would be converted again in every layer.
        """
        held, seen, width = self.held[name], self.seen, self.width
        slots = torch.arange(held.visible + width, device=seen.device)  # a row may end behind them
        shown = (slots < held.lengths[:, None])[:, None].repeat(1, width, 1)
        at = held.lengths[:, None] + slots[:width]
        shown = shown.scatter_(2, at[:, None].expand_as(seen), seen)[..., : held.visible]
        if held.columns is not None:
            key = self._with_block(held, held.columns, self.query)
            least = held.kind.least_seen(self.query, self.pads[:, None])
            shown = shown & (key[:, None] >= least[:, :, None])
        return compat.additive_mask(shown, self.dtype)

    def _with_block(
        self, held: HeldSlots, before: torch.Tensor, of_block: torch.Tensor
    ) -> torch.Tensor:
        """Return numbers of slots, [rows, visible], with the block's own in its slots."""
        at = held.lengths[:, None] + torch.arange(self.width, device=of_block.device)
        numbers = torch.cat([before[:, : held.visible], of_block], 1).scatter_(1, at, of_block)
        return numbers[:, : held.visible]


def ancestors(parents: np.ndarray) -> np.ndarray:
    """Return what each token of a block sees, [rows, width, width], from parents, [rows, width]."""
    width = parents.shape[1]
    row, own = np.arange(len(parents))[:, None], np.arange(width)
    if (parents == own - 1).all():
        return np.tri(width, dtype=bool)[None].repeat(len(parents), 0)
    above = np.where(parents < 0, own, parents)
    seen = np.tile(np.eye(width, dtype=bool), (len(parents), 1, 1))
    for _ in range((width - 1).bit_length()):  # each round doubles the distance
        seen = seen | seen[row, above]
        above = above[row, above]
    return seen


def ancestor_words(parents: np.ndarray) -> np.ndarray:
    """Pack whom the tokens see into `Block.words`, [rows, width] int64."""
    seen = ancestors(parents)
    words = np.zeros((*seen.shape[:2], 8), np.uint8)
    packed = np.packbits(seen, axis=2, bitorder="little")
    words[:, :, : packed.shape[2]] = packed
    return words.view("<i8")[:, :, 0]
