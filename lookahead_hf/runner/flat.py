"""Flat blocks: the tokens of all rows one after another, so that no layer computes padding.

The model gets one row of tokens, [1, tokens], which only attention divides among the rows of the
cache again. A forward costs what its tokens cost, however unequally the rows share them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], Any]
"""Attention of `(query, key, value, mask)`; its first result is [rows, width, heads, dim]."""


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent rows of the cache with equally many tokens in a block, which attend in one call.

    Attributes:
        rows: The rows.
        tokens: Their tokens in the block, row after row.
        width: Tokens per row.
    """

    rows: slice
    tokens: slice
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class RunMask:
    """What the tokens of a run see in layers of one kind.

    Attributes:
        run: The run.
        visible: Slots that its attention reads.
        mask: Additive, [rows of the run, 1, width, visible]; None where a token sees its row's
            slots up to its own.
    """

    run: Run
    visible: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class FlatBlock:
    """How one row of tokens belongs to the rows of the cache.

    Attributes:
        masks: Masks of the runs, by the id of the stand-in that the model gets for the mask.
        stand_ins: The stand-ins, [1, 1, 1, 1] each; holding them keeps their ids taken.
        places: Where the forward's logits have those of each row, [rows, width].
    """

    masks: dict[int, list[RunMask]]
    stand_ins: tuple[torch.Tensor, ...]
    places: np.ndarray

    def of_rows(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits by row, [1, any, vocab] to [rows, width, vocab]; copied only where they must be.

        Behind a row's own there are copies of its last ones.
        """
        flat, places = logits[0], self.places
        if places.size == len(flat) and (places.ravel() == np.arange(places.size)).all():
            return flat.view(*places.shape, -1)
        at = torch.from_numpy(places.ravel()).to(flat.device)
        return flat.index_select(0, at).view(*places.shape, -1)

    def attend(
        self,
        stand_in: torch.Tensor | None,
        query: torch.Tensor,  # [1, heads, tokens, dim]
        key: torch.Tensor,  # [rows, kv_heads, slots, dim]
        value: torch.Tensor,  # [rows, kv_heads, slots, v_dim]
        attend: _Attend,
    ) -> torch.Tensor:  # [1, tokens, heads, v_dim]
        """Let the tokens of each run attend to the slots of their own rows.

        On a CPU one call for four rows of 5 tokens takes half of what four calls take, and four
        calls for rows of 17, 1, 1 and 1 tokens half of one call that pads them.
        """
        masks = self.masks.get(id(stand_in)) or self._only_masks()
        outs = []
        for of_run in masks:
            run, seen = of_run.run, slice(0, of_run.visible)
            rows = query[0, :, run.tokens].unflatten(1, (-1, run.width)).transpose(0, 1)
            out = attend(rows, key[run.rows, :, seen], value[run.rows, :, seen], of_run.mask)[0]
            outs.append(out.reshape(1, -1, *out.shape[2:]))
        return torch.cat(outs, 1) if len(outs) > 1 else outs[0]

    def _only_masks(self) -> list[RunMask]:
        """The masks where all layers take the same; the model may have copied the stand-in."""
        (masks,) = self.masks.values()
        return masks


def runs_of(counts: np.ndarray, lengths: np.ndarray) -> list[Run]:
    """Join adjacent rows with equally many tokens, unless their texts differ much in length.

    Args:
        counts: Tokens of each row in the block, [rows].
        lengths: Tokens of each row before them, [rows].
    """
    runs: list[Run] = []
    ends, totals = counts.cumsum().tolist(), (counts + lengths).tolist()
    for row, (count, end) in enumerate(zip(counts.tolist(), ends, strict=True)):
        last = runs[-1] if runs else None
        if last is not None and count and last.rows.stop == row and last.width == count:
            joined = totals[last.rows.start : row + 1]
            if max(joined) <= 2 * min(joined):
                rows, tokens = slice(last.rows.start, row + 1), slice(last.tokens.start, end)
                runs[-1] = Run(rows, tokens, count)
                continue
        if count:
            runs.append(Run(slice(row, row + 1), slice(end - count, end), count))
    return runs
