"""A whole step as a function of tensors that keep their addresses, so that a graph replays it."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from lookahead_hf import compat, kernels
from lookahead_hf.cache.adopt import AdoptedCache
from lookahead_hf.cache.slots import SlotGroup
from lookahead_hf.draft import DraftTree
from lookahead_hf.kernels import TreeWalk
from lookahead_hf.rows import Rows
from lookahead_hf.runner import attention, torch_compile, tree_attention, unread_mask
from lookahead_hf.runner.cuda.joined_linear import JoinedLinears
from lookahead_hf.runner.cuda.transfer import pinned
from lookahead_hf.runner.masks import MaskKind
from lookahead_hf.runner.passthrough_kwargs import widened
from lookahead_hf.runner.tree_attention import BlockTree
from lookahead_hf.runner.unread_mask import UnreadMask

MAX_WIDTH = 64
"""Tokens per row of a block, the last one included: one bit each in the ancestor words."""


class DraftViews(NamedTuple):
    """A step's draft on the device; node 0 is the row's last token.

    Attributes:
        tokens: [rows, width] int64, 0 in padding.
        parents: Parent of each node, -1 for node 0 and in padding, [rows, width] int64.
        depth: 0 for node 0 and in padding, [rows, width] int64.
        bits: Bit j says that node j is an ancestor of it, or itself, [rows, width] int64.
        num_nodes: Drafted nodes of each row, [rows] int64.
        live: 1 for rows whose text goes on, else 0, [rows] int64.
        kept: Tokens of each row that the host counts in the cache, [rows] int64.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depth: torch.Tensor
    bits: torch.Tensor
    num_nodes: torch.Tensor
    live: torch.Tensor
    kept: torch.Tensor


def pack(rows: Rows, draft: DraftTree, lengths: np.ndarray, width: int) -> np.ndarray:
    """Return a step's draft as one array, [rows * (4 * width + 3)] int64, like `DraftViews`.

    Args:
        rows: The texts.
        draft: What is fed behind the last tokens.
        lengths: Tokens of each row in the cache, [rows].
        width: Tokens per row, padding included.
    """
    fields, sizes = draft.padded(width, rows.last_tokens), np.diff(draft.row_offsets)
    parts = fields.ravel(), _ancestor_bits(fields[1]).ravel(), sizes, rows.live, lengths
    return np.concatenate(parts, dtype=np.int64)


def _ancestor_bits(parents: np.ndarray) -> np.ndarray:  # [rows, width] both
    """Return every node's own bit and those of its ancestors; each round doubles the distance."""
    width = parents.shape[1]
    bits = np.broadcast_to(np.uint64(1) << np.arange(width, dtype=np.uint64), parents.shape)
    above = np.where(parents < 0, np.arange(width), parents)
    for _ in range(max(width - 1, 1).bit_length()):
        bits = bits | np.take_along_axis(bits, above, 1)
        above = np.take_along_axis(above, above, 1)
    return bits.astype(np.int64)


_FIELDS = ("lengths", "prompt_lengths", "pads", "next_position", "columns")


def only_group(cache: AdoptedCache) -> SlotGroup:
    """Return the group of all layers: a cache that was taken over without trimming has one."""
    (group,) = cache.slots.each_group()
    return group


class StepState:
    """Tensors that a step reads and writes in place.

    Attributes:
        lengths: Tokens of each row in the cache, [rows] int64; a step adds those that it keeps.
        prompt_lengths: The same after the prompt, [rows] int64.
        pads: Columns of the prompt that a row does not attend to, [rows] int64.
        next_position: Position of the token after the prompt, [..., rows, 1].
        columns: Column of the token in every slot, [rows, capacity] int64.
    """

    def __init__(self, cache: AdoptedCache, next_position: torch.Tensor) -> None:
        device = next_position.device
        self.lengths = torch.from_numpy(cache.slots.lengths.copy()).to(device)
        self.prompt_lengths = self.lengths.clone()
        self.pads = torch.from_numpy(np.array(cache.pads, np.int64)).to(device)
        self.next_position = next_position.clone()
        self.columns = self.pads.new_zeros(len(self.pads), 0)
        self.fit(cache)
        self._drafts: dict[int, torch.Tensor] = {}

    def fit(self, cache: AdoptedCache) -> None:
        """Follow the cache to its present capacity."""
        group = only_group(cache)
        if self.columns.shape[1] != group.capacity:
            columns = cache.token_columns(group, group.capacity)
            self.columns = torch.from_numpy(columns).to(self.pads.device)

    def copy_(self, other: StepState) -> None:
        """Take over the values of another call whose tensors have the same shapes."""
        for name in _FIELDS:
            getattr(self, name).copy_(getattr(other, name))

    def shapes(self) -> tuple[Any, ...]:
        """Shapes and types that `copy_` needs to be the same, but for the number of slots."""
        fields = [getattr(self, name) for name in _FIELDS[:-1]]
        return tuple((tuple(field.shape), field.dtype, field.device) for field in fields)

    def with_room(self, capacity: int) -> StepState:
        """A state of the same shapes, for a cache of so many slots."""
        other = copy.copy(self)
        for name in _FIELDS[:-1]:
            setattr(other, name, getattr(self, name).clone())
        other.columns = other.pads.new_zeros(len(self.columns), capacity)
        other._drafts = {}
        return other

    def draft(self, width: int) -> DraftViews:
        """The draft of a step of this width."""
        rows = len(self.lengths)
        flat = self._draft(width)
        fields = flat[: 4 * rows * width].view(4, rows, width)
        sizes = flat[4 * rows * width :].view(3, rows)
        return DraftViews(*fields.unbind(0), *sizes.unbind(0))

    def load(self, packed: np.ndarray, width: int) -> None:
        """Copy a packed draft to the device without waiting."""
        self._draft(width).copy_(pinned(packed, self.lengths.device), non_blocking=True)

    def rehearse(self, width: int) -> None:
        """Load a draft of this width without nodes, for rows that are all live."""
        draft = self.draft(width)
        for field, value in zip(draft, (0, -1, 0, 1, 0, 1, 0), strict=True):
            field.fill_(value)
        draft.bits.bitwise_left_shift_(torch.arange(width, device=draft.bits.device))

    def _draft(self, width: int) -> torch.Tensor:
        if width not in self._drafts:
            with torch.inference_mode(False):  # graphs' drafts are written outside of it, too
                size = len(self.lengths) * (4 * width + 3)
                device = self.lengths.device
                self._drafts[width] = torch.zeros(size, dtype=torch.int64, device=device)
        return self._drafts[width]


class StepFunction:
    """The step of one model over one cache.

    Attributes:
        reads_masks: Whether a layer read a mask in the latest forward; true before the first one.
    """

    reads_masks = True

    def __init__(
        self,
        model: Any,
        cache: AdoptedCache,
        state: StepState,
        extras: dict[str, Any],
        kinds: list[MaskKind],
        takes_dict: bool,
        joined: JoinedLinears | None = None,
    ) -> None:
        """`extras` is what plain passes with every forward; `joined` are layers of one input."""
        self._model, self._cache, self._state = model, cache, state
        self._extras, self._kinds, self._takes_dict = extras, kinds, takes_dict
        self._joined = joined
        self._is_compiled = torch_compile.is_compiled(model)

    def run(self, width: int, visible: int) -> tuple[Any, ...]:
        """Run everything from the masks to the new lengths, choosing the likeliest tokens.

        Args:
            width: Tokens per row, at most `MAX_WIDTH`.
            visible: Slots that the attention sees.

        Returns:
            What `forward` returns, `TreeWalk.packed`, and the tensors of a `RowScan` of the logits
            if a kernel made one.
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
        # The host may have kept less of a text that has ended than the walk accepted.
        state.lengths.copy_(torch.where(draft.live > 0, state.lengths, draft.kept))
        fed = state.lengths - state.prompt_lengths
        fed = fed.minimum((fed * draft.live).max())  # an ended text may have filled a table
        built = self._masks(draft, width, visible)
        inputs = {
            **widened(self._extras, width),
            "input_ids": draft.tokens,
            "position_ids": state.next_position + (fed[:, None] + draft.depth),
            "attention_mask": built if self._takes_dict else next(iter(built.values())),
            "past_key_values": self._cache.slots,
            "use_cache": True,
        }
        experts = compat.set_up_for_step(self._model, len(draft.tokens), width)
        linears = nullcontext() if self._joined is None else self._joined.laid_under()
        with experts, linears, attention.step(state.lengths.device, self._trees(built, draft)):
            outputs = self._model(**inputs, return_dict=True)
        self.reads_masks = any(unread_mask.made(mask) is not None for mask in built.values())
        return outputs.logits, compat.last_hidden_states(outputs)

    def try_masks(self, width: int, visible: int) -> bool:
        """Return whether a layer reads a mask, as a forward shows where the kernel may attend."""
        if self._is_served(self._state.draft(width)):
            self.forward(width, visible)
        return self.reads_masks

    def decide(
        self,
        width: int,
        scores: torch.Tensor,  # [rows, width, vocab]
        noise: torch.Tensor | None = None,  # [rows, depths, vocab]
        keep_scan: bool = False,
    ) -> TreeWalk:
        """Walk down the tree, keep the accepted path in the cache and count it in the lengths."""
        state, draft = self._state, self._state.draft(width)
        tree = draft.tokens, draft.parents, draft.num_nodes
        depth = None if noise is None else draft.depth
        done = kernels.verify_tree(scores, *tree, noise, depth, keep_scan=keep_scan)
        kept = done.num_accepted + 1
        kernels.compact_path(only_group(self._cache).path_table, state.lengths, done.path, kept)
        state.lengths.add_(kept * draft.live)
        return done

    def _trees(self, built: dict[str, torch.Tensor], draft: DraftViews) -> list[BlockTree]:
        """Return the masks in terms of the kernel, which knows windows but no chunks."""
        state, by_length = self._state, self._cache.slots.extent.shown is None
        if not self._is_served(draft):
            return []
        return [
            BlockTree(
                built[kind.name],
                state.lengths,
                draft.bits,
                kind.window or 0,
                state.columns if kind.window else None,
                state.pads,
                by_length=by_length,
            )
            for kind in self._kinds
            if kind.chunk is None
        ]

    def _is_served(self, draft: DraftViews) -> bool:
        """Whether the kernel may attend; compiled code has attention of its own."""
        device, width = draft.tokens.device, draft.tokens.shape[1]
        return tree_attention.serves(device, width) and not self._is_compiled

    def _masks(self, draft: DraftViews, width: int, visible: int) -> dict[str, torch.Tensor]:
        """Place the block in the cache and return the mask of every kind by name."""
        group = only_group(self._cache)
        place = torch.arange(width, device=draft.tokens.device)
        row = torch.arange(len(draft.tokens), device=place.device)[:, None]
        flat = row * group.capacity + self._state.lengths[:, None] + place
        group.place_at(flat.reshape(-1), visible)
        made = {kind.name: partial(self._mask, kind, draft, visible) for kind in self._kinds}
        if not self._is_served(draft):
            return {name: make() for name, make in made.items()}
        shape = len(draft.tokens), 1, width, visible
        like = shape, self._model.dtype, draft.tokens.device
        return {name: UnreadMask.of(make, *like) for name, make in made.items()}

    def _mask(self, kind: MaskKind, draft: DraftViews, visible: int) -> torch.Tensor:
        """`[rows, 1, width, visible]`, 0 where a slot is seen and the lowest number elsewhere."""
        state, width = self._state, draft.tokens.shape[1]
        slot = torch.arange(visible, device=draft.tokens.device)
        node = slot - state.lengths[:, None]  # [rows, visible]
        drafted = draft.bits[:, :, None] >> node.clamp(0, width - 1)[:, None] & 1 == 1
        seen = (node < 0)[:, None] | ((node >= 0) & (node < width))[:, None] & drafted
        if kind.is_limited:
            newest = state.lengths + state.pads
            query = newest[:, None] + draft.depth
            of_block = query.gather(1, node.clamp(0, width - 1))
            key = torch.where(node < 0, state.columns[:, :visible], of_block)
            seen &= kind.is_near(query[:, :, None], key[:, None], state.pads[:, None, None])
        dtype = self._model.dtype
        lowest = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=node.device)
        return torch.where(seen[:, None], torch.zeros_like(lowest), lowest)
