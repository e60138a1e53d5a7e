"""What the kernels return."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RowScan(NamedTuple):
    """One pass over logits; verification reads `best`, and `topk_rows` reads everything.

    Attributes:
        best: Greatest entry of every tile, packed by `_common.pack`, [rows, nodes, tiles] int64.
        parts: Order keys of the greatest entries of `PART` entries each, [rows, nodes, parts]
            int32; a tile has a whole number of parts.
        sums: `sum(exp(entry - greatest entry))` of every tile, [rows, nodes, tiles] float32.
    """

    best: torch.Tensor
    parts: torch.Tensor
    sums: torch.Tensor


class Wanted(NamedTuple):
    """How many entries `topk_rows` finds for which nodes of a step's trees.

    Attributes:
        walk: `TreeWalk.packed`, [rows, 2 + width] int64; all k are found where a path ends.
        num_nodes: Drafted nodes of each row, behind which there is padding, [rows] integers.
        few: Entries to find at all other nodes, at most k.
    """

    walk: torch.Tensor
    num_nodes: torch.Tensor
    few: int


class TopRows(NamedTuple):
    """The best entries of every row.

    Attributes:
        values: Best first, [rows, k] float32.
        ids: Their token ids, [rows, k] int64.
        log_sum: `logsumexp` of the whole row, [rows] float32.
    """

    values: torch.Tensor
    ids: torch.Tensor
    log_sum: torch.Tensor


class TreeWalk(NamedTuple):
    """The accepted path of every row.

    Node 0 is the row's last token, node `1 + i` its drafted node `i`. A path begins with node 0, so
    `path[:, i]` belongs `i` slots behind the row's last token, and a row keeps `num_accepted + 1`
    of the tokens that were fed.

    Attributes:
        packed: `num_accepted`, `bonus` and `path` side by side, [rows, 2 + 1 + nodes] int64: all
            that the host needs.
        best: Token chosen at each node, -1 where a row has no such node, [rows, 1 + nodes] int64;
            None where tokens are not chosen at every node.
        scan: A kernel's pass over the scores, if it was to be kept.
    """

    packed: torch.Tensor
    best: torch.Tensor | None = None
    scan: RowScan | None = None

    @property
    def num_accepted(self) -> torch.Tensor:
        """Accepted nodes of each row, node 0 not counted, [rows] int64."""
        return self.packed[:, 0]

    @property
    def bonus(self) -> torch.Tensor:
        """The target's own token after the last accepted node, [rows] int64."""
        return self.packed[:, 1]

    @property
    def path(self) -> torch.Tensor:
        """Node 0 and the accepted nodes from the root down, then -1, [rows, 1 + nodes] int64."""
        return self.packed[:, 2:]
