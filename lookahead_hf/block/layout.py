"""Lays a step out: the tokens, positions, masks and arguments of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lookahead_hf.block.block import Block, HeldSlots, MaskKind, kernel_serves
from lookahead_hf.block.packed import PackedBlock, Run, runs_of
from lookahead_hf.cache.slots import ColumnCache
from lookahead_hf.draft import DraftTree, place_in_row
from lookahead_hf.model import compat
from lookahead_hf.model.facts import facts_of


def widened(passed: dict[str, Any], width: int) -> dict[str, Any]:
    """Widen arguments that every step passes on to `width` tokens per row."""
    types = {name: passed[name] for name in passed.keys() & compat.TOKEN_TYPES}
    return passed | {name: t.expand(-1, width, *t.shape[2:]) for name, t in types.items()}


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The shape of all blocks of a call, whatever is drafted."""

    width: int  # tokens per row; drafts are padded to it
    capacity: int  # slots behind the longest prompt


Inputs = tuple[dict[str, Any], Block | PackedBlock]
"""The arguments of the model's forward on a block, and what the tokens of the block see."""


@dataclass(frozen=True, slots=True)
class PromptState:
    """State after the prefill, where decoding starts."""

    names: compat.DecoderNames  # names of the decoder's inputs
    cache: ColumnCache  # holds the prompts; empty if steps read them, too
    kinds: list[MaskKind]  # the masks that the model's layers need
    passed: dict[str, Any]  # arguments that every forward gets
    next_position: torch.Tensor  # position of the token after the prompt, [..., rows, 1]
    prompt_positions: np.ndarray | None = None  # those of the prompt, [rows, columns], if packed


class BlockLayout:
    """Lays blocks out over a cache."""

    def __init__(self, model: Any, begin: PromptState, lazy: bool = False) -> None:
        """`lazy`: whether layers may run without reading their masks."""
        self._dtype, self._cache, self._kinds = model.dtype, begin.cache, begin.kinds
        self._next_position, self._device = begin.next_position, begin.next_position.device
        self._mask_dict = compat.takes_mask_dict(model)
        self._names = names = begin.names
        self._prompt_positions = begin.prompt_positions
        self._passed = {
            **begin.passed,
            names.mask: None,
            names.cache: begin.cache.for_model,
            "use_cache": True,
        }
        self._takes_kept = "logits_to_keep" in compat.forward_arguments(model)
        facts = facts_of(model)
        self._needs_columns, self._has_states = facts.needs_columns, bool(facts.mixers)
        self._pads = self._on_device(begin.cache.pads)
        self._uncounted = self._pads[:, None] if self._names.skips_pads else 0
        self._lazy = lazy

    def block(self, fields: np.ndarray, ahead: np.ndarray) -> Inputs:
        """Place a block behind what each row has in the cache.

        `fields` are tokens, parents and depths as of `DraftTree.padded`, [3, rows, width]; `ahead`,
        [rows], counts the tokens of each row that were fed since the prompt.
        """
        tokens, parents, depths = fields
        width, slots = tokens.shape[1], self._cache.slots
        slots.place(width)
        offsets = self._on_device(ahead[:, None] + depths)
        inputs = widened(self._passed, width)
        inputs[self._names.ids] = self._on_device(tokens)
        if self._names.positions is not None:
            inputs[self._names.positions] = self._next_position + offsets
        query = self._cache.num_columns + offsets
        if self._needs_columns and self._names.columns is not None:
            inputs[self._names.columns] = query - self._uncounted
        held = {kind.name: self._held(kind, kind.is_limited) for kind in self._kinds}
        of_slots = None
        if self._needs_columns:
            group = slots.groups[self._kinds[0].name]
            of_slots = self._on_device(self._cache.token_columns(group))
        has_fixed_shape = slots.extent.shown is not None
        block = Block(
            *(parents, query, self._pads, held, self._dtype, of_slots),
            for_kernel=kernel_serves(self._device, width),
            by_length=not has_fixed_shape,
        )
        is_causal = width == 1 and not has_fixed_shape
        built = block.make_masks(is_causal, self._lazy or block.for_kernel)
        if any(mask is not None for mask in built.values()):
            one = next(iter(built.values()))
            named = compat.with_states(built) if self._has_states else built
            inputs[self._names.mask] = named if self._mask_dict else one
        return inputs, block

    def packed(self, fed: Sequence[np.ndarray], draft: DraftTree) -> Inputs:
        """Place the tokens of a packed block, [1, tokens], behind those that the cache has.

        Rows may read prompts and decode side by side: a row that reads has n tokens of its prompt
        in `fed` and no draft; a row that decodes has its last token in `fed` and a tree in the
        draft. A row without tokens is not in the block, and costs nothing.

        The block's logits, [rows, 1 + most nodes, vocab], have at index 0 of a row those after its
        last token in `fed`, and at index 1 + i those after node i. None are computed after its
        other tokens.

        Args:
            fed: Tokens of each row that its text has and its cache lacks, in order, [tokens] int64
                each.
            draft: The draft behind them; the nodes of a row without tokens are left out.
        """
        slots, drafted = self._cache.slots, np.diff(draft.row_offsets)
        num_fed = np.array([len(tokens) for tokens in fed])
        nodes = np.where(num_fed > 0, drafted, 0)
        counts = num_fed + nodes
        row, place = np.repeat(np.arange(len(fed)), counts), place_in_row(_offsets(counts))
        is_node, is_used = place >= num_fed[row], np.repeat(num_fed > 0, drafted)
        tokens, parents, index = np.empty_like(row), place - 1, slots.lengths[row] + place
        tokens[~is_node], tokens[is_node] = np.concatenate(fed), draft.token_ids[is_used]
        last_fed = (num_fed - 1)[row[is_node]]
        parents[is_node] = last_fed + 1 + draft.parents[is_used]
        index[is_node] = slots.lengths[row[is_node]] + last_fed + draft.depth[is_used]
        columns = self._cache.columns_of(row, index)
        # Causality alone hides the padding of prompts that all begin in this block.
        runs = runs_of(counts, slots.lengths, (num_fed <= 1) | (not slots.lengths.any()))
        slots.place(counts, is_packed=True)
        read, kept = np.flatnonzero(place >= num_fed[row] - 1), None
        places = _places_in_read(num_fed, nodes, 1 + draft.max_nodes)
        if len(read) == len(row) or not self._takes_kept:
            places = read[places]
        else:
            kept = read
        blocks = [self._of_run(run, parents, columns) for run in runs]
        masks = {kind.name: torch.zeros(1, 1, 1, 1) for kind in self._kinds}
        packed = PackedBlock([*zip(runs, blocks, strict=True)], masks, places, kept)
        assert self._names.positions is not None
        inputs: dict[str, Any] = {
            **self._passed,
            self._names.ids: torch.from_numpy(tokens)[None],
            self._names.mask: masks if self._mask_dict else next(iter(masks.values())),
            self._names.positions: torch.from_numpy(self._positions(row, columns))[None],
        }
        if kept is not None:
            inputs["logits_to_keep"] = torch.from_numpy(kept)
        return inputs, packed

    def _positions(self, row: np.ndarray, columns: np.ndarray) -> np.ndarray:
        beyond = columns - self._cache.num_columns
        positions: np.ndarray = self._next_position.numpy()[row, 0] + beyond
        early = beyond < 0
        if early.any():
            assert self._prompt_positions is not None
            positions[early] = self._prompt_positions[row[early], columns[early]]
        return positions

    def _of_run(self, run: Run, parents: np.ndarray, columns: np.ndarray) -> Block:
        """Return the block of a run, given parents and columns of all tokens, [tokens] each."""
        parents, columns = parents[run.tokens], columns[run.tokens]
        last = int(columns.max())
        if run.padded is not None:
            own, columns = np.arange(run.width), columns[run.padded]
            is_padding = own >= run.counts[:, None]  # in a chain, which needs no mask by itself
            parents = np.where(is_padding, own - 1, parents[run.padded])
        held = {
            kind.name: self._held(kind, kind.may_hide(last), run.rows, run.counts)
            for kind in self._kinds
        }
        parents, query = (each.reshape(-1, run.width) for each in (parents, columns))
        block = Block(parents, self._on_device(query), self._pads[run.rows], held, self._dtype)
        is_first = not self._cache.slots.lengths[run.rows].any()
        block.make_masks(block.is_chain and (run.width == 1 or is_first), self._lazy)
        return block

    def _held(
        self,
        kind: MaskKind,
        is_limited: bool,
        rows: slice = slice(None),
        counts: np.ndarray | None = None,
    ) -> HeldSlots:
        group = self._cache.slots.groups[kind.name]
        lengths = group.lengths[rows]
        visible = group.visible if counts is None else int((lengths + counts).max())
        columns = None
        if is_limited:
            columns = self._on_device(self._cache.token_columns(group, visible)[rows])
        offsets = self._on_device((self._cache.pads + group.dropped)[rows])
        is_even = bool((lengths == lengths[0]).all())
        return HeldSlots(kind, self._on_device(lengths), visible, offsets, columns, is_even, group)

    def _on_device(self, numbers: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self._device)


def _places_in_read(num_fed: np.ndarray, nodes: np.ndarray, width: int) -> np.ndarray:
    """Return the places of each row's tokens among those with logits, [rows, width].

    These are each row's last fed token and its nodes. A row with fewer repeats its last one, and a
    row without tokens has those of others.
    """
    counts = np.where(num_fed > 0, 1 + nodes, 0)
    places = _offsets(counts)[:-1, None] + np.minimum(np.arange(width), nodes[:, None])
    return np.minimum(places, counts.sum() - 1)


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], counts.cumsum()])
