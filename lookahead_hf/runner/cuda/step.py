"""A whole step as a function of tensors that keep their addresses, so that a graph replays it."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from lookahead_hf import compat, kernels
from lookahead_hf.cache.adopt import AdoptedCache
from lookahead_hf.cache.slots import SlotGroup
from lookahead_hf.draft import DraftTree
from lookahead_hf.kernels import TreeWalk
from lookahead_hf.model import compiled
from lookahead_hf.patches import lazy_mask, tree_attention
from lookahead_hf.patches.forward import ForwardContext, running
from lookahead_hf.patches.lazy_mask import LazyMask
from lookahead_hf.patches.tree_attention import BlockTree
from lookahead_hf.rows import Rows
from lookahead_hf.runner.cuda.transfer import pinned
from lookahead_hf.runner.masks import MaskKind
from lookahead_hf.runner.passthrough_kwargs import widened

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
    assert width <= MAX_WIDTH, "a token has one bit in the words of the others"
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


_FIELDS = ("lengths", "prompt_lengths", "pads", "next_position")


class GroupState:
    """Tensors that say what the slots of a group of layers hold, changed in place.

    Attributes:
        dropped: Tokens of each row that came before its first slot, [rows] int64.
        columns: Column of the token in every slot, [rows, capacity] int64.
    """

    def __init__(self, pads: torch.Tensor, capacity: int = 0) -> None:
        self.dropped, self.columns = torch.zeros_like(pads), pads.new_zeros(len(pads), capacity)
        self._known: np.ndarray | None = None  # what `dropped` holds

    def fit(self, cache: AdoptedCache, group: SlotGroup) -> None:
        """Follow a group to its present capacity and to what it has dropped."""
        device, size = self.dropped.device, self.columns.shape[1]
        if self._known is group.dropped and size == group.capacity:
            return
        if size != group.capacity:
            self.columns = self.dropped.new_zeros(len(self.dropped), group.capacity)
        columns = cache.token_columns(group, group.capacity)
        self.columns.copy_(pinned(columns, device), non_blocking=True)
        self.dropped.copy_(pinned(group.dropped.copy(), device), non_blocking=True)
        self._known = group.dropped

    def copy_(self, other: GroupState) -> None:
        """Take over the values of another call's group of the same capacity."""
        self.dropped.copy_(other.dropped)
        self.columns.copy_(other.columns)
        self._known = other._known


class StepState:
    """Tensors that a step reads and writes in place.

    Attributes:
        lengths: Tokens of each row in the cache, [rows] int64; a step adds those that it keeps.
        prompt_lengths: The same after the prompt, [rows] int64.
        pads: Columns of the prompt that a row does not attend to, [rows] int64.
        next_position: Position of the token after the prompt, [..., rows, 1].
        groups: What the slots of each group of layers hold.
    """

    def __init__(self, cache: AdoptedCache, next_position: torch.Tensor) -> None:
        device = next_position.device
        self.lengths = torch.from_numpy(cache.slots.lengths.copy()).to(device)
        self.prompt_lengths = self.lengths.clone()
        self.pads = torch.from_numpy(np.array(cache.pads, np.int64)).to(device)
        self.next_position = next_position.clone()
        self.groups = [GroupState(self.pads) for _ in cache.slots.each_group()]
        self.fit(cache)
        self._drafts: dict[int, torch.Tensor] = {}

    def fit(self, cache: AdoptedCache) -> None:
        """Follow the cache to its present capacity."""
        for part, group in zip(self.groups, cache.slots.each_group(), strict=True):
            part.fit(cache, group)

    def copy_(self, other: StepState) -> None:
        """Take over the values of another call whose tensors have the same shapes."""
        for name in _FIELDS:
            getattr(self, name).copy_(getattr(other, name))
        for part, of_other in zip(self.groups, other.groups, strict=True):
            part.copy_(of_other)

    def shapes(self) -> tuple[Any, ...]:
        """Shapes and types that `copy_` needs to be the same, but for the number of slots."""
        fields = [getattr(self, name) for name in _FIELDS]
        return tuple((tuple(field.shape), field.dtype, field.device) for field in fields)

    def with_room(self, capacities: list[int]) -> StepState:
        """A state of the same shapes, for groups of layers with so many slots."""
        other = copy.copy(self)
        for name in _FIELDS:
            setattr(other, name, getattr(self, name).clone())
        other.groups = [GroupState(other.pads, capacity) for capacity in capacities]
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


class Held(NamedTuple):
    """What a group of layers holds when a step begins.

    Attributes:
        lengths: Slots of each row that are in use, [rows] int64.
        pads: Column less slot of the tokens behind the prompt, [rows] int64.
        columns: Column of the token in every slot, [rows, capacity] int64.
        visible: Slots that the attention sees.
    """

    lengths: torch.Tensor
    pads: torch.Tensor
    columns: torch.Tensor
    visible: int


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
        by_kernel: Counter[bool] | None = None,
    ) -> None:
        """`extras` is what plain passes with every forward; `by_kernel` as in `ForwardContext`."""
        self._model, self._cache, self._state = model, cache, state
        self._extras, self._kinds, self._takes_dict = extras, kinds, takes_dict
        self._is_compiled, self._by_kernel = compiled.is_compiled(model), by_kernel

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
        held = self._hold(draft, visible)
        built = self._masks(draft, held)
        inputs = {
            **widened(self._extras, width),
            "input_ids": draft.tokens,
            "position_ids": state.next_position + (fed[:, None] + draft.depth),
            "attention_mask": built if self._takes_dict else next(iter(built.values())),
            "past_key_values": self._cache.slots,
            "use_cache": True,
        }
        experts = compat.set_up_for_step(self._model, len(draft.tokens), width)
        context = ForwardContext(self._trees(built, draft, held), by_kernel=self._by_kernel)
        with experts, running(context, state.lengths.device):
            outputs = self._model(**inputs, return_dict=True)
        self.reads_masks = any(lazy_mask.made(mask) is not None for mask in built.values())
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
        for group, part in self._groups if width > 1 else ():
            kernels.compact_path(group.path_table, self._lengths(group, part), done.path, kept)
        state.lengths.add_(kept * draft.live)
        return done

    @property
    def _groups(self) -> list[tuple[SlotGroup, GroupState]]:
        return [*zip(self._cache.slots.each_group(), self._state.groups, strict=True)]

    def _lengths(self, group: SlotGroup, part: GroupState) -> torch.Tensor:
        """Slots of each row that a group of layers uses, [rows]."""
        lengths = self._state.lengths
        return lengths if group.window is None else lengths - part.dropped

    def _hold(self, draft: DraftViews, visible: int) -> dict[str, Held]:
        """Place the block in every group of layers; return what is held by the name of a mask."""
        rows, width = draft.tokens.shape
        place = torch.arange(width, device=draft.tokens.device)
        row = torch.arange(rows, device=place.device)[:, None]
        found: dict[SlotGroup, Held] = {}
        for group, part in self._groups:
            lengths, seen = self._lengths(group, part), min(visible, group.capacity)
            flat = row * group.capacity + lengths[:, None] + place
            group.place_at(flat.reshape(-1), seen)
            pads = self._state.pads if group.window is None else self._state.pads + part.dropped
            found[group] = Held(lengths, pads, part.columns, seen)
        return {name: found[group] for name, group in self._cache.slots.groups.items()}

    def _trees(
        self, built: dict[str, torch.Tensor], draft: DraftViews, held: dict[str, Held]
    ) -> list[BlockTree]:
        """Return the masks in terms of the kernel, which knows windows but no chunks."""
        by_length = self._cache.slots.extent.shown is None
        if not self._is_served(draft):
            return []
        return [
            BlockTree(
                built[kind.name],
                held[kind.name].lengths,
                draft.bits,
                kind.window or 0,
                held[kind.name].columns if kind.window else None,
                held[kind.name].pads,
                by_length=by_length,
            )
            for kind in self._kinds
            if kind.chunk is None
        ]

    def _is_served(self, draft: DraftViews) -> bool:
        """Whether the kernel may attend; compiled code has attention of its own."""
        device, width = draft.tokens.device, draft.tokens.shape[1]
        return tree_attention.serves(device, width) and not self._is_compiled

    def _masks(self, draft: DraftViews, held: dict[str, Held]) -> dict[str, torch.Tensor]:
        """Return the mask of every kind by name."""
        made = {
            kind.name: partial(self._mask, kind, draft, held[kind.name]) for kind in self._kinds
        }
        if not self._is_served(draft):
            return {name: make() for name, make in made.items()}
        rows, width = draft.tokens.shape
        like = self._model.dtype, draft.tokens.device
        return {
            name: LazyMask.of(make, (rows, 1, width, held[name].visible), *like)
            for name, make in made.items()
        }

    def _mask(self, kind: MaskKind, draft: DraftViews, held: Held) -> torch.Tensor:
        """`[rows, 1, width, visible]`, 0 where a slot is seen and the lowest number elsewhere."""
        width, visible = draft.tokens.shape[1], held.visible
        slot = torch.arange(visible, device=draft.tokens.device)
        node = slot - held.lengths[:, None]  # [rows, visible]
        drafted = draft.bits[:, :, None] >> node.clamp(0, width - 1)[:, None] & 1 == 1
        seen = (node < 0)[:, None] | ((node >= 0) & (node < width))[:, None] & drafted
        if kind.is_limited:
            newest = held.lengths + held.pads
            query = newest[:, None] + draft.depth
            of_block = query.gather(1, node.clamp(0, width - 1))
            key = torch.where(node < 0, held.columns[:, :visible], of_block)
            seen &= kind.is_near(query[:, :, None], key[:, None], self._state.pads[:, None, None])
        dtype = self._model.dtype
        lowest = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=node.device)
        return torch.where(seen[:, None], torch.zeros_like(lowest), lowest)
