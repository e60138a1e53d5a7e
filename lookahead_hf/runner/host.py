"""The target of one call: prompt in, then blocks of draft tokens, each kept or rolled back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lookahead_hf import compat
from lookahead_hf.cache.adopt import AdoptedCache
from lookahead_hf.cache.slots import SlotGroup
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.kernels import compact_path
from lookahead_hf.rows import Rows
from lookahead_hf.runner import (
    attention,
    implicit_positions,
    masks,
    passthrough_kwargs,
    positions,
    prefix_tuning,
    spoiled,
    tree_attention,
)
from lookahead_hf.runner.prompt_states import PromptStates
from lookahead_hf.runner.tree_attention import BlockTree


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """One forward's worth: the last token of every row and the draft behind it."""

    width: int  # tokens per row, padding included
    model_inputs: dict[str, Any]
    trees: list[BlockTree] = field(default_factory=list)
    columns: implicit_positions.Columns | None = None  # for a model that counts positions itself


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A shape that all blocks of a call have, whatever is drafted.

    Attributes:
        width: Tokens per row; what a draft leaves free is padding that nothing sees.
        room: Slots behind the longest prompt.
    """

    width: int
    room: int


class Runner:
    """A model whose cache has been taken over for the length of a call.

    Attributes:
        cache: The cache, after `prefill`.
        prompt: What the prefill left of the prompt, for drafting.
        execution: "replayed" where graphs ran the steps, else why not; None where none were wanted.
        most_nodes: Most nodes that a row's draft can have, None for any number.
    """

    execution: str | None = None
    most_nodes: int | None = None

    def __init__(
        self,
        model: Any,
        num_rows: int,
        shape: BlockShape | None = None,
    ) -> None:
        """Prepare for one call.

        Args:
            model: The target.
            num_rows: Rows of the batch.
            shape: The shape of every block, None for as large as each draft needs.
        """
        self.model = model
        self.num_rows = num_rows
        self.cache: AdoptedCache | None = None
        self.prompt = PromptStates(model)
        self._shape = shape
        self._watch = spoiled.Watch(num_rows)
        self._names = compat.decoder_names(model)
        self._extras: dict[str, Any] = {}
        self._kinds = masks.of_model(model)
        self._mask_dict = compat.takes_mask_dict(model)
        self._windowed = any(kind.window or kind.chunk for kind in self._kinds)

    def prefill(
        self,
        input_ids: torch.Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        before_steps: Callable[[], object] = lambda: None,
    ) -> Any:
        """Run the prompt as plain `generate` does and take its cache over.

        Args:
            input_ids: Prompt tokens, [rows, columns].
            generation_config: As prepared by `generate`.
            model_kwargs: As prepared by `generate`.
            before_steps: Called behind the forward, before anything is made ready for the steps.

        Returns:
            The forward's outputs.
        """
        with self.prompt.captured():
            outputs = compat.prefill(self.model, input_ids, generation_config, model_kwargs)
        before_steps()
        mask = model_kwargs.get(self._names.mask)
        attended = None
        if mask is not None:
            mask = mask.to("cpu").numpy().astype(bool)
            attended = prefix_tuning.of_model(self.model).attended(mask)
        self._extras = passthrough_kwargs.passed_on(model_kwargs, self._names)
        cache = outputs.past_key_values
        returned = compat.is_users_cache(cache) or bool(generation_config.return_dict_in_generate)
        position_ids = positions.of_prompt(self.model, input_ids, model_kwargs)
        assert position_ids is not None
        self._take_over(cache, attended, position_ids, returned)
        return outputs

    def start(self, input_ids: torch.Tensor, cache: compat.Cache) -> None:
        """Run a prompt without padding, [rows, columns], outside of `generate`."""
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        position_ids = columns[None].repeat(self.num_rows, 1)
        outputs = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
        )
        self._take_over(outputs.past_key_values, None, position_ids)

    def _take_over(
        self,
        cache: compat.Cache,
        attended: np.ndarray | None,  # [rows, columns]
        position_ids: torch.Tensor,  # [..., rows, columns]
        returned: bool = False,
    ) -> None:
        takes = compat.layer_masks(self.model)
        self.cache = AdoptedCache(cache, attended, self.num_rows, takes, self._trims, returned)
        groups = self.cache.slots.groups
        self._kinds = [kind.within(groups[kind.name].window) for kind in self._kinds]
        self._windowed = any(kind.window or kind.chunk for kind in self._kinds)
        if self._shape is not None:
            self.cache.slots.fix(self.cache.slots.longest + self._shape.room)
        self._next_position = position_ids[..., -1:] + 1  # [..., rows, 1]
        pads = torch.from_numpy(self.cache.pads[:, None]).to(position_ids.device)
        self._uncounted = pads if self._names.skips_pads else 0

    @property
    def mode(self) -> str:
        """How steps are run now; what they cost depends on it."""
        return ""

    @property
    def _trims(self) -> bool:
        """Whether layers with a window hold no more than that."""
        return self._shape is None

    def layout(self, rows: Rows, draft: DraftTree) -> BlockInputs:
        """Give every token of the block its slot, column, position and mask."""
        assert self.cache is not None
        width = max(1 + draft.max_nodes, 0 if self._shape is None else self._shape.width)
        # Padding repeats the last token, since any other may have K and V that are not finite.
        tokens = np.repeat(rows.last_tokens[:, None], width, 1)
        for row in range(self.num_rows):
            nodes = draft.token_ids[draft.row(row)]
            tokens[row, 1 : 1 + len(nodes)] = nodes
        return self._block(tokens, draft, _ahead(rows))

    def _block(self, tokens: np.ndarray, draft: DraftTree, ahead: np.ndarray) -> BlockInputs:
        """`ahead`: tokens of every row that were fed since the prompt, [rows]."""
        assert self.cache is not None
        width = tokens.shape[1]
        depths = masks.block_depths(draft, self.num_rows, width)
        self.cache.slots.place(width)
        offsets = torch.from_numpy(ahead[:, None] + depths).to(self._next_position.device)
        inputs: dict[str, Any] = {
            **passthrough_kwargs.widened(self._extras, width),
            self._names.ids: torch.from_numpy(tokens).to(self._next_position.device),
            self._names.mask: None,
            "past_key_values": self.cache.for_model,
            "use_cache": True,
        }
        if self._names.positions is not None:
            inputs[self._names.positions] = self._next_position + offsets
        columns = self._counted(depths, ahead)
        if columns is not None and self._names.columns is not None:
            inputs[self._names.columns] = columns[0] - self._uncounted
        slots = self.cache.slots
        uniform = bool((slots.lengths == slots.lengths[0]).all())
        if width == 1 and uniform and not self._windowed and slots.shown is None:
            return BlockInputs(width, inputs, columns=columns)  # every slot is seen by all
        seen = np.stack([masks.ancestors(draft, row, width) for row in range(self.num_rows)])
        built = {
            kind.name: masks.additive(
                self._allowed(kind, seen, depths, ahead),
                self.model.dtype,
                self._next_position.device,
            )
            for kind in self._kinds
        }
        inputs[self._names.mask] = built if self._mask_dict else next(iter(built.values()))
        return BlockInputs(width, inputs, self._trees(built, seen), columns)

    def _counted(self, depths: np.ndarray, ahead: np.ndarray) -> implicit_positions.Columns | None:
        """What a model that counts positions itself is to count; None where it is told them."""
        assert self.cache is not None
        if self._names.positions is not None:
            return None
        kind = self._kinds[0]  # of several only where the slots' columns are not asked for
        columns = self._columns(self.cache.slots.groups[kind.name], depths, ahead)
        query, key = (torch.from_numpy(each).to(self._next_position.device) for each in columns)
        return query, key

    def _trees(self, built: dict[str, torch.Tensor], seen: np.ndarray) -> list[BlockTree]:
        """The masks in the terms of the kernel, which knows windows but no chunks."""
        assert self.cache is not None
        device = self._next_position.device
        if not tree_attention.serves(device, seen.shape[1]):
            return []
        words = torch.from_numpy(tree_attention.ancestor_words(seen)).to(device)
        trees = []
        for kind in self._kinds:
            if kind.chunk is None:
                group = self.cache.slots.groups[kind.name]
                given = [group.lengths]
                if kind.window:
                    given += [self.cache.token_columns(group), self.cache.pads + group.dropped]
                lengths, *columns = (torch.from_numpy(array).to(device) for array in given)
                window = kind.window or 0
                trees.append(BlockTree(built[kind.name], lengths, words, window, *columns))
        return trees

    def _allowed(
        self, kind: masks.MaskKind, seen: np.ndarray, depths: np.ndarray, ahead: np.ndarray
    ) -> np.ndarray:
        """Who sees which slot of the layers that take this mask, [rows, width, visible] bool."""
        assert self.cache is not None
        group = self.cache.slots.groups[kind.name]
        limited = kind.window or kind.chunk
        columns = self._columns(group, depths, ahead) if limited else None
        return masks.allowed(kind, seen, group.lengths, group.visible, columns, self.cache.pads)

    def _columns(
        self, group: SlotGroup, depths: np.ndarray, ahead: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Columns of the block, [rows, width], and of a group's slots, [rows, visible]."""
        assert self.cache is not None
        query = self.cache.num_columns + ahead[:, None] + depths
        key = self.cache.token_columns(group)
        for row, length in enumerate(group.lengths.tolist()):
            key[row, length : length + depths.shape[1]] = query[row]
        return query, key

    def forward(self, inputs: BlockInputs) -> Any:
        """Outputs of the model for the block; its logits are [rows, width, vocab]."""
        device, given = self._next_position.device, inputs.model_inputs
        with attention.step(device, inputs.trees), implicit_positions.step(inputs.columns):
            return self.model(**given, return_dict=True)

    def is_spoiled(self, outputs: Any, live: np.ndarray) -> bool:
        """Whether a draft may have spoiled the logits of a live row, [rows] bool."""
        return self._watch.is_spoiled(self._not_finite(outputs), live)

    def repeat_alone(self, rows: Rows) -> Any:
        """Run a step again from its last tokens alone, in slots that no draft has written."""
        assert self.cache is not None
        spoiled.clear(self.cache.slots)
        outputs = self.forward(self.layout(rows, DraftTree.empty(self.num_rows)))
        self._watch.without_draft(self._not_finite(outputs))
        return outputs

    def _not_finite(self, outputs: Any) -> np.ndarray:
        found: np.ndarray = spoiled.not_finite(outputs.logits).cpu().numpy()
        return found

    def commit(self, verdict: Verdict) -> int:
        """Keep each live row's last token and accepted path in the cache, and nothing else.

        Returns:
            Accepted tokens whose K and V had to be moved.
        """
        assert self.cache is not None
        slots = self.cache.slots
        accepted = verdict.num_accepted
        moved = self._close_gaps(verdict, accepted) if len(verdict.path) else 0
        slots.lengths += np.where(verdict.num_emitted > 0, accepted + 1, 0)
        return moved

    def _close_gaps(self, verdict: Verdict, accepted: np.ndarray) -> int:
        """Move the accepted paths together; nothing is touched where they are chains already."""
        assert self.cache is not None
        identity = np.arange(1 + int(accepted.max()))
        path = np.tile(identity, (self.num_rows, 1))
        for row, count in enumerate(accepted.tolist()):
            path[row, 1 : 1 + count] = verdict.accepted(row) + 1
        moved = int((path != identity).sum())
        for group in self.cache.slots.each_group() if moved else ():
            if group.layers:
                compact_path(
                    group.path_table,
                    torch.from_numpy(group.lengths),
                    torch.from_numpy(path),
                    torch.from_numpy(accepted + 1),
                )
        return moved

    def end(self) -> None:
        """The call is over, or has failed; the cache is handed back after that."""

    @property
    def fed(self) -> np.ndarray:
        """Tokens behind the prompt that each row keeps in the cache, [rows]."""
        assert self.cache is not None
        return self.cache.slots.lengths - (self.cache.num_columns - self.cache.pads)

    @property
    def num_fed(self) -> int:
        """The same of all rows."""
        return int(self.fed.min())

    def feed(self, tokens: list[list[int]], ahead: np.ndarray) -> Any:
        """Put further tokens of every row into the cache, in one forward; `keep` keeps them.

        Args:
            tokens: Tokens per row, the last token of the row first; rows may have none.
            ahead: Tokens of every row that were fed since the prompt, [rows].
        """
        width = max(map(len, tokens))
        block = np.zeros((self.num_rows, width), np.int64)
        for row, fed in enumerate(tokens):
            block[row, : len(fed)] = fed
            block[row, len(fed) :] = fed[-1] if fed else 0  # padding, as in `layout`
        draft = DraftTree.from_chains([[row[1:]] for row in tokens])
        return Runner.forward(self, self._block(block, draft, ahead))

    def keep(self, counts: np.ndarray) -> None:
        """Keep the first tokens of the latest block in every row, [rows]."""
        assert self.cache is not None
        self.cache.slots.lengths += counts


def _ahead(rows: Rows) -> np.ndarray:
    """Tokens of every row that were fed since the prompt, [rows].

    A text that has ended may have filled a table of positions, whose end its last token is.
    """
    ahead = rows.num_emitted - 1
    return np.minimum(ahead, ahead[rows.live].max(initial=0))
