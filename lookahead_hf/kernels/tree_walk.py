"""What verification returns: the path that each row accepted, in one tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lookahead_hf.kernels.row_scan import RowScan


class TreeWalk(NamedTuple):
    """The accepted path of every row.

    Nodes are numbered as the model saw them: node 0 is the row's last token, node `1 + i` its
    drafted node `i`. A path begins with node 0, so `path[:, i]` belongs `i` slots after the row's
    last token, and a row keeps `num_accepted + 1` of the tokens that were fed.

    Attributes:
        packed: `num_accepted`, `bonus` and `path` side by side, [rows, 2 + 1 + nodes] int64: all
            that the host needs, in one copy.
        best: Token chosen at each node, -1 where a row has no such node, [rows, 1 + nodes] int64;
            None where tokens are not chosen at every node.
        scan: What the pass over the scores found beside it, if it was asked for and is a kernel's.
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
