"""The layout of a block: every token gets its slot, column, position and mask."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lookahead_hf import compat
from lookahead_hf.cache.adopt import AdoptedCache
from lookahead_hf.cache.slots import SlotGroup
from lookahead_hf.draft import DraftTree
from lookahead_hf.runner import implicit_positions, masks, passthrough_kwargs, tree_attention
from lookahead_hf.runner.tree_attention import BlockTree


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """The inputs of one forward: the last token of every row and the draft behind it.

    Attributes:
        model_inputs: Arguments of the model's forward.
        trees: The masks in the terms of the attention kernel.
        columns: Columns of tokens and slots, for a model that counts positions itself.
    """

    model_inputs: dict[str, Any]
    trees: list[BlockTree] = field(default_factory=list)
    columns: implicit_positions.Columns | None = None


class BlockLayout:
    """Lays blocks out over a cache that was taken over."""

    def __init__(
        self,
        model: Any,
        cache: AdoptedCache,
        kinds: list[masks.MaskKind],
        passed: dict[str, Any],
        next_position: torch.Tensor,  # [..., rows, 1], of the token after the prompt
    ) -> None:
        """Prepare for one call, in which every forward is passed the arguments in `passed`, too."""
        self._model, self._cache, self._kinds, self._passed = model, cache, kinds, passed
        self._next_position, self._device = next_position, next_position.device
        self._names, self._mask_dict = compat.decoder_names(model), compat.takes_mask_dict(model)
        self._is_limited = any(kind.is_limited for kind in kinds)
        pads = torch.from_numpy(cache.pads[:, None]).to(self._device)
        self._uncounted = pads if self._names.skips_pads else 0

    def block(
        self, tokens: np.ndarray, depths: np.ndarray, draft: DraftTree, ahead: np.ndarray
    ) -> BlockInputs:
        """Place a block behind what each row has in the cache.

        Args:
            tokens: The last token of each row and the draft's nodes, [rows, width].
            depths: Depth of each of them, 0 for the last token and padding, [rows, width].
            draft: The draft.
            ahead: Tokens of each row that were fed since the prompt, [rows].
        """
        width = tokens.shape[1]
        self._cache.slots.place(width)
        offsets = torch.from_numpy(ahead[:, None] + depths).to(self._device)
        inputs: dict[str, Any] = {
            **passthrough_kwargs.widened(self._passed, width),
            self._names.ids: torch.from_numpy(tokens).to(self._device),
            self._names.mask: None,
            self._names.cache: self._cache.for_model,
            "use_cache": True,
        }
        if self._names.positions is not None:
            inputs[self._names.positions] = self._next_position + offsets
        columns = self._counted(depths, ahead)
        if columns is not None and self._names.columns is not None:
            inputs[self._names.columns] = columns[0] - self._uncounted
        slots = self._cache.slots
        uniform = bool((slots.lengths == slots.lengths[0]).all())
        if width == 1 and uniform and not self._is_limited and slots.extent.shown is None:
            return BlockInputs(inputs, columns=columns)  # each token sees every slot
        seen = np.stack([masks.ancestors(draft, row, width) for row in range(len(tokens))])
        built = {kind.name: self._mask(kind, seen, depths, ahead) for kind in self._kinds}
        one = next(iter(built.values()))
        inputs[self._names.mask] = (
            compat.with_states(self._model, built) if self._mask_dict else one
        )
        return BlockInputs(inputs, self._trees(built, seen), columns)

    def _counted(self, depths: np.ndarray, ahead: np.ndarray) -> implicit_positions.Columns | None:
        """Columns for a model that counts positions itself; None for one that is given them."""
        if not compat.counts_positions(self._model):
            return None
        kind = self._kinds[0]  # of several only where the slots' columns are not asked for
        columns = self._columns(self._cache.slots.groups[kind.name], depths, ahead)
        query, key = (torch.from_numpy(each).to(self._device) for each in columns)
        return query, key

    def _trees(self, built: dict[str, torch.Tensor], seen: np.ndarray) -> list[BlockTree]:
        """The masks in the terms of the kernel, which supports windows but not chunks."""
        device = self._device
        if not tree_attention.serves(device, seen.shape[1]):
            return []
        words = torch.from_numpy(tree_attention.ancestor_words(seen)).to(device)
        trees = []
        for kind in self._kinds:
            if kind.chunk is None:
                group = self._cache.slots.groups[kind.name]
                given = [group.lengths]
                if kind.window:
                    given += [self._cache.token_columns(group), self._cache.pads + group.dropped]
                lengths, *columns = (torch.from_numpy(array).to(device) for array in given)
                window = kind.window or 0
                trees.append(BlockTree(built[kind.name], lengths, words, window, *columns))
        return trees

    def _mask(
        self, kind: masks.MaskKind, seen: np.ndarray, depths: np.ndarray, ahead: np.ndarray
    ) -> torch.Tensor:
        """The mask of the layers of one kind, [rows, 1, width, visible]."""
        group = self._cache.slots.groups[kind.name]
        columns = self._columns(group, depths, ahead) if kind.is_limited else None
        place = group.lengths, group.visible, columns, self._cache.pads
        return masks.additive(kind, seen, *place, self._model.dtype, self._device)

    def _columns(
        self, group: SlotGroup, depths: np.ndarray, ahead: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Columns of the block, [rows, width], and of a group's slots, [rows, visible]."""
        query = self._cache.num_columns + ahead[:, None] + depths
        key = self._cache.token_columns(group)
        for row, length in enumerate(group.lengths.tolist()):
            key[row, length : length + depths.shape[1]] = query[row]
        return query, key
