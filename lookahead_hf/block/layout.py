"""Lays a step out: the tokens, positions, masks and arguments of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from lookahead_hf.block import masks, tree_attention
from lookahead_hf.block.flat import FlatBlock, Run, RunMask, runs_of
from lookahead_hf.block.tree_attention import BlockTree
from lookahead_hf.cache.slots import ColumnCache
from lookahead_hf.draft import DraftTree, place_in_row
from lookahead_hf.model import compat
from lookahead_hf.model.facts import facts_of


def passed_on(model_kwargs: dict[str, Any], names: compat.DecoderNames) -> dict[str, Any]:
    """Return the prepared arguments that every step passes on; steps set those in `names`."""
    ours = names.prepared | compat.PROMPT_ONLY
    passed = {k: v for k, v in model_kwargs.items() if k not in ours and v is not None}
    for name in passed.keys() & set(compat.TOKEN_TYPES):  # of every token behind the prompt
        last = passed[name][:, -1:]
        passed[name] = torch.zeros_like(last) if name == "mm_token_type_ids" else last
    return passed


def widened(passed: dict[str, Any], width: int) -> dict[str, Any]:
    """Widen the arguments of `passed_on` to `width` tokens per row."""
    types = {name: passed[name] for name in compat.TOKEN_TYPES if name in passed}
    wide = {name: t.expand(-1, width, *t.shape[2:]) for name, t in types.items()}
    return {**passed, **wide}


class Columns(NamedTuple):
    """Columns of a block's tokens and of the slots that they see.

    Attributes:
        query: Columns of the tokens, [rows, width].
        key: Columns of the slots, [rows, slots].
        order: Attended tokens before each slot's, [rows, slots].
    """

    query: torch.Tensor
    key: torch.Tensor
    order: torch.Tensor

    @property
    def distance(self) -> torch.Tensor:
        """Columns from every slot to every token, at least 0, [rows, width, slots]."""
        return (self.query[:, :, None] - self.key[:, None, :]).clamp(min=0)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The shape of all blocks of a call, whatever is drafted.

    Attributes:
        width: Tokens per row; drafts are padded to it.
        room: Slots behind the longest prompt.
        by_kernel: Whether our kernel does all attention, even where torch is faster.
    """

    width: int
    room: int
    by_kernel: bool = False


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """The inputs of one forward: the last token of every row and the draft behind it.

    Attributes:
        model_inputs: Arguments of the model's forward.
        num_tokens: Tokens of the block, padding included.
        trees: The masks in the attention kernel's format.
        columns: Columns of tokens and slots, for a model that derives positions from its cache.
        flat: How the tokens belong to the rows, if the block is flat.
    """

    model_inputs: dict[str, Any]
    num_tokens: int
    trees: list[BlockTree] = field(default_factory=list)
    columns: Columns | None = None
    flat: FlatBlock | None = None


@dataclass(frozen=True, slots=True)
class Beginning:
    """What steps go on from.

    Attributes:
        cache: Holds the prompts; empty if steps read them, too.
        kinds: The masks that the model's layers need.
        passed: Arguments that every forward gets.
        next_position: Position of the token after the prompt, [..., rows, 1].
        prompt_positions: Those of the prompt, [rows, columns], if blocks are flat.
    """

    cache: ColumnCache
    kinds: list[masks.MaskKind]
    passed: dict[str, Any]
    next_position: torch.Tensor
    prompt_positions: np.ndarray | None = None


class BlockLayout:
    """Lays blocks out over a cache."""

    def __init__(self, model: Any, begin: Beginning) -> None:
        self._model, self._cache, self._kinds = model, begin.cache, begin.kinds
        self._passed, self._prompt_positions = begin.passed, begin.prompt_positions
        self._next_position, self._device = begin.next_position, begin.next_position.device
        self._names, self._mask_dict = compat.decoder_names(model), compat.takes_mask_dict(model)
        facts = facts_of(model)
        self._needs_columns, self._has_states = facts.needs_columns, bool(facts.mixers)
        self._is_limited = any(kind.is_limited for kind in begin.kinds)
        pads = torch.from_numpy(begin.cache.pads[:, None]).to(self._device)
        self._uncounted = pads if self._names.skips_pads else 0

    def block(self, fields: np.ndarray, ahead: np.ndarray) -> BlockInputs:
        """Place a block behind what each row has in the cache.

        Args:
            fields: Tokens, parents and depths as of `DraftTree.padded`, [3, rows, width].
            ahead: Tokens of each row that were fed since the prompt, [rows].
        """
        tokens, parents, depths = fields
        width = tokens.shape[1]
        self._cache.slots.place(width)
        offsets = torch.from_numpy(ahead[:, None] + depths).to(self._device)
        inputs: dict[str, Any] = {
            **widened(self._passed, width),
            self._names.ids: torch.from_numpy(tokens).to(self._device),
            self._names.mask: None,
            self._names.cache: self._cache.for_model,
            "use_cache": True,
        }
        if self._names.positions is not None:
            inputs[self._names.positions] = self._next_position + offsets
        columns = self._counted(depths, ahead)
        if columns is not None and self._names.columns is not None:
            inputs[self._names.columns] = columns.query - self._uncounted
        slots = self._cache.slots
        uniform = bool((slots.lengths == slots.lengths[0]).all())
        if width == 1 and uniform and not self._is_limited and slots.extent.shown is None:
            return BlockInputs(inputs, tokens.size, columns=columns)  # each token sees every slot
        seen, query = masks.ancestors(parents), self._query(depths, ahead)
        built = {
            kind.name: self._mask(kind, seen, query if kind.is_limited else None)
            for kind in self._kinds
        }
        named = compat.with_states(built) if self._has_states else built
        inputs[self._names.mask] = named if self._mask_dict else next(iter(built.values()))
        return BlockInputs(inputs, tokens.size, self._trees(built, seen), columns)

    def flat(self, fed: Sequence[np.ndarray], draft: DraftTree) -> BlockInputs:
        """Place the tokens of a flat block, [1, tokens], behind those that rows have in the cache.

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
        tokens, index = np.empty_like(row), slots.lengths[row] + place
        tokens[~is_node], tokens[is_node] = np.concatenate(fed), draft.token_ids[is_used]
        index[is_node] = (slots.lengths + num_fed - 1)[row[is_node]] + draft.depth[is_used]
        columns = self._cache.columns_of(row, index)
        # Causality alone hides the padding of prompts that all begin in this block.
        runs = runs_of(counts, slots.lengths, (num_fed <= 1) | (not slots.lengths.any()))
        slots.place(counts, is_flat=True)
        stand_ins, built = self._run_masks(runs, num_fed, draft, columns)
        assert self._names.positions is not None
        inputs: dict[str, Any] = {
            **self._passed,
            self._names.ids: torch.from_numpy(tokens)[None],
            self._names.mask: stand_ins if self._mask_dict else next(iter(stand_ins.values())),
            self._names.positions: torch.from_numpy(self._positions(row, columns))[None],
            self._names.cache: self._cache.for_model,
            "use_cache": True,
        }
        read, kept = np.flatnonzero(place >= num_fed[row] - 1), None
        places = _places_in_read(num_fed, nodes, 1 + draft.max_nodes)
        if len(read) == len(row) or "logits_to_keep" not in compat.forward_arguments(self._model):
            places = read[places]
        else:
            inputs["logits_to_keep"], kept = torch.from_numpy(read), read
        flat = FlatBlock(built, tuple(stand_ins.values()), places, kept)
        return BlockInputs(inputs, tokens.size, flat=flat)

    def _run_masks(
        self, runs: list[Run], num_fed: np.ndarray, draft: DraftTree, columns: np.ndarray
    ) -> tuple[dict[str, torch.Tensor], dict[int, list[RunMask]]]:
        """Return stand-ins for the masks by kind, and the masks of all runs by their ids."""
        seen = [_seen_in(run, num_fed, draft) for run in runs]
        stand_ins = {kind.name: torch.zeros(1, 1, 1, 1) for kind in self._kinds}
        return stand_ins, {
            id(stand_ins[kind.name]): [
                self._run_mask(kind, run, of_run, columns[run.tokens])
                for run, of_run in zip(runs, seen, strict=True)
            ]
            for kind in self._kinds
        }

    def _positions(self, row: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Return the positions of tokens, given their rows and columns, [tokens] int64 each."""
        beyond = columns - self._cache.num_columns
        positions: np.ndarray = self._next_position.numpy()[row, 0] + beyond
        early = beyond < 0
        if early.any():
            assert self._prompt_positions is not None
            positions[early] = self._prompt_positions[row[early], columns[early]]
        return positions

    def _run_mask(
        self, kind: masks.MaskKind, run: Run, seen: np.ndarray | None, columns: np.ndarray
    ) -> RunMask:
        """Return the mask of a run in layers of one kind; `columns` are its tokens', [tokens]."""
        group, width = self._cache.slots.groups[kind.name], run.width
        lengths = group.lengths[run.rows]
        visible = int((lengths + run.counts).max())
        is_causal = seen is None and (width == 1 or not lengths.any())
        is_limited = kind.may_hide(int(columns.max()))
        if is_causal and not is_limited and (lengths == lengths[0]).all():
            return RunMask(run, visible, None)
        if seen is None:
            seen = np.tri(width, dtype=bool)[None].repeat(len(lengths), 0)
        query = None
        if is_limited:
            query = (columns if run.padded is None else columns[run.padded]).reshape(-1, width)
        mask = self._mask(kind, seen, query, visible, run.rows)
        return RunMask(run, visible, mask)

    def _counted(self, depths: np.ndarray, ahead: np.ndarray) -> Columns | None:
        """Return the columns for a model that derives positions from its cache, else None."""
        if not self._needs_columns:
            return None
        kind = self._kinds[0]  # of several only where the slots' columns are not asked for
        group = self._cache.slots.groups[kind.name]
        query, key = self._query(depths, ahead), self._cache.token_columns(group)
        order = np.tile(np.arange(key.shape[1]), (len(depths), 1))
        for row, length in enumerate(group.lengths.tolist()):
            block = slice(length, length + depths.shape[1])
            key[row, block], order[row, block] = query[row], length + depths[row]
        told = (torch.from_numpy(each).to(self._device) for each in (query, key, order))
        return Columns(*told)

    def _trees(self, built: dict[str, torch.Tensor], seen: np.ndarray) -> list[BlockTree]:
        """Return the masks in the kernel's format, which has windows but no chunks."""
        device = self._device
        if not tree_attention.serves(device, seen.shape[1]):
            return []
        words = torch.from_numpy(tree_attention.ancestor_words(seen)).to(device)
        by_length = self._cache.slots.extent.shown is None
        trees = []
        for kind in self._kinds:
            if kind.chunk is None:
                group = self._cache.slots.groups[kind.name]
                given = [group.lengths]
                if kind.window:
                    given += [self._cache.token_columns(group), self._cache.pads + group.dropped]
                lengths, *columns = (torch.from_numpy(array).to(device) for array in given)
                window = kind.window or 0
                trees.append(
                    BlockTree(
                        built[kind.name], lengths, words, window, *columns, by_length=by_length
                    )
                )
        return trees

    def _mask(
        self,
        kind: masks.MaskKind,
        seen: np.ndarray,  # [rows, width, width]
        query: np.ndarray | None,  # columns of the tokens where they matter, [rows, width]
        visible: int | None = None,
        rows: slice = slice(None),
    ) -> torch.Tensor:
        """The mask of the layers of one kind for some rows, [rows, 1, width, visible]."""
        group = self._cache.slots.groups[kind.name]
        visible = group.visible if visible is None else visible
        given = [seen, group.lengths[rows], self._cache.pads[rows]]
        if query is not None:
            given += [query, self._cache.token_columns(group, visible)[rows]]
        tree, lengths, pads, *columns = map(torch.from_numpy, given)
        both = (columns[0], columns[1]) if columns else None
        mask = masks.additive(kind, tree, lengths, visible, both, pads, self._model.dtype)
        return mask.to(self._device)

    def _query(self, depths: np.ndarray, ahead: np.ndarray) -> np.ndarray:
        """Columns of the tokens of a block, [rows, width]."""
        query: np.ndarray = self._cache.num_columns + ahead[:, None] + depths
        return query


def _seen_in(run: Run, num_fed: np.ndarray, draft: DraftTree) -> np.ndarray | None:
    """Return which tokens of its row's block each query of a run sees, [rows, width, width] bool.

    None if each sees all tokens before it.
    """
    nodes = np.diff(draft.row_offsets)
    if not nodes[run.rows].any():
        return None
    seen = np.tri(run.width, dtype=bool)[None].repeat(len(run.counts), 0)
    for index, count in enumerate(run.counts.tolist()):
        row = run.rows.start + index
        of_row, first = seen[index], num_fed[row]
        of_row[first:count, first:count] = masks.ancestors(draft.parents[None, draft.row(row)])[0]
        of_row[count:] = of_row[count - 1]
    return seen


def _places_in_read(num_fed: np.ndarray, nodes: np.ndarray, width: int) -> np.ndarray:
    """Return the places of each row's tokens among those with logits, [rows, width].

    These are each row's last fed token and its nodes. A row with fewer repeats its last one, and a
    row without tokens has those of others.
    """
    counts = np.where(num_fed > 0, 1 + nodes, 0)
    places = _offsets(counts)[:-1, None] + np.minimum(np.arange(width), nodes[:, None])
    return np.minimum(places, counts.sum() - 1)


def _offsets(counts: np.ndarray) -> np.ndarray:
    """Return where the entries of every row begin and end: [rows] -> [rows + 1]."""
    return np.concatenate([[0], counts.cumsum()])
