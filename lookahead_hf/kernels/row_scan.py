"""What a pass over logits leaves behind, and what `topk_rows` finds from it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RowScan(NamedTuple):
    """One pass over logits, of which verification reads the tiles and `topk_rows` all.

    Attributes:
        best: Greatest entry of every tile, as `_common.pack` packs it, [rows, nodes, tiles] int64.
        parts: Order keys of the greatest entries of `PART` entries each, [rows, nodes, parts]
            int32; a tile has a whole number of parts.
        sums: `sum(exp(entry - greatest entry))` of every tile, [rows, nodes, tiles] float32.
    """

    best: torch.Tensor
    parts: torch.Tensor
    sums: torch.Tensor


class TopRows(NamedTuple):
    """The best entries of every row.

    Attributes:
        values: Best first, [rows, k] float32.
        ids: Where they stand, [rows, k] int64.
        log_sum: `logsumexp` of the whole row, [rows] float32.
    """

    values: torch.Tensor
    ids: torch.Tensor
    log_sum: torch.Tensor
