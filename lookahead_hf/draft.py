"""What a step passes from room to room: the draft tree and the verdict on it, flat over rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

ROOT = -1
"""Parent of the nodes that follow a row's last emitted token directly."""


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Which sources proposed each node, and how sure each was: compressed rows over the nodes.

    A node carries one entry per source that proposed it. `bucket` is the source's own class of
    proposals (a match length, a rank) whose acceptance rate calibration learns.
    """

    offsets: np.ndarray  # [nodes + 1] int64
    source: np.ndarray  # [entries] int32, index into the drafter's list of sources
    bucket: np.ndarray  # [entries] int32


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Draft tokens of all rows, row after row; in a row every parent stands before its children.

    Row `r` owns the nodes `row_offsets[r]:row_offsets[r + 1]`; `parents` counts within the row.

    `probs` says what each node's token was drawn from, for verification="rejection": a distribution
    of the target's tokens, in which siblings drawn before it have no part. What came out of a draw
    must decide nothing else: everything drawn is in the tree, siblings in the order of the draws,
    and how much is drawn does not depend on it. Without `probs` any tokens will do.
    """

    row_offsets: np.ndarray  # [rows + 1] int64
    token_ids: np.ndarray  # [nodes] int64
    parents: np.ndarray  # [nodes] int32, ROOT for children of the last emitted token
    depth: np.ndarray  # [nodes] int32, 1 for children of the last emitted token
    score: np.ndarray  # [nodes] float32, estimated probability that its path is accepted
    evidence: Evidence | None = None
    probs: object | None = None  # torch.Tensor [nodes, vocab], what each node was drawn from

    @property
    def num_rows(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    def row(self, row: int) -> slice:
        """The nodes of one row as a slice of the flat arrays."""
        return slice(int(self.row_offsets[row]), int(self.row_offsets[row + 1]))

    @property
    def max_nodes(self) -> int:
        """Nodes of the row that has most."""
        return int(np.diff(self.row_offsets).max(initial=0))

    def with_chains(self, chain: np.ndarray, rows: np.ndarray) -> DraftTree:
        """The same with a chain, [tokens], in rows that have no nodes, [rows] bool."""
        counts = np.where(rows, len(chain), np.diff(self.row_offsets))
        new = np.repeat(rows, counts)
        depth = np.arange(1, len(chain) + 1)

        def with_new(held: np.ndarray, added: np.ndarray) -> np.ndarray:
            merged = np.empty(len(new), held.dtype)
            merged[~new], merged[new] = held, np.tile(added, int(rows.sum()))
            return merged

        evidence = self.evidence
        if evidence is not None:
            sizes = np.zeros(len(new), np.int64)
            sizes[~new] = np.diff(evidence.offsets)
            offsets = np.concatenate([np.zeros(1, np.int64), sizes.cumsum()])
            evidence = Evidence(offsets, evidence.source, evidence.bucket)
        return DraftTree(
            np.concatenate([[0], counts.cumsum()]),
            with_new(self.token_ids, chain),
            with_new(self.parents, depth - 2),
            with_new(self.depth, depth),
            with_new(self.score, np.zeros(len(chain))),
            evidence,
        )

    @staticmethod
    def empty(num_rows: int) -> DraftTree:
        """No draft for any row."""
        return DraftTree(
            np.zeros(num_rows + 1, np.int64),
            np.empty(0, np.int64),
            np.empty(0, np.int32),
            np.empty(0, np.int32),
            np.empty(0, np.float32),
        )

    @staticmethod
    def from_rows(rows: Iterable[tuple[Sequence[int], Sequence[int]]]) -> DraftTree:
        """Build a tree from `(token_ids, parents)` per row, parents before children.

        Raises:
            ValueError: A parent does not stand before its child.
        """
        offsets, tokens, parents, depth = [0], list[int](), list[int](), list[int]()
        for row_tokens, row_parents in rows:
            row_depth: list[int] = []
            for node, parent in enumerate(row_parents):
                if not ROOT <= parent < node:
                    raise ValueError(
                        f"node {node} names parent {parent}: a parent must stand before its child "
                        f"(or be {ROOT}, the row's last emitted token)"
                    )
                row_depth.append(1 if parent == ROOT else row_depth[parent] + 1)
            tokens.extend(row_tokens)
            parents.extend(row_parents)
            depth.extend(row_depth)
            offsets.append(len(tokens))
        return DraftTree(
            np.asarray(offsets, np.int64),
            np.asarray(tokens, np.int64),
            np.asarray(parents, np.int32),
            np.asarray(depth, np.int32),
            np.ones(len(tokens), np.float32),
        )

    @staticmethod
    def from_chains(rows: Iterable[Iterable[Sequence[int]]]) -> DraftTree:
        """Build a tree from any number of continuations per row; a shared prefix is shared."""
        built = []
        for chains in rows:
            tokens: list[int] = []
            parents: list[int] = []
            known: dict[tuple[int, int], int] = {}
            for chain in chains:
                at = ROOT
                for token in chain:
                    key = (at, int(token))
                    if key not in known:
                        known[key] = len(tokens)
                        tokens.append(int(token))
                        parents.append(at)
                    at = known[key]
            built.append((tokens, parents))
        return DraftTree.from_rows(built)


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What verification decided in one step: per row the accepted path and the emitted tokens.

    A live row emits its accepted tokens and one bonus token; where the text stops inside the path,
    the last emitted token stands for the bonus token. Rows that are not live emit nothing, in
    lockstep pads; those, and the pads behind a text that ends in the middle of the step, are in
    `path` too, which says what the cache keeps. What became text is `of_text`.
    """

    token_offsets: np.ndarray  # [rows + 1] int64
    token_ids: np.ndarray  # [emitted] int64
    path_offsets: np.ndarray  # [rows + 1] int64
    path: np.ndarray  # [accepted] int32, node indices within the row, from the root down
    live: np.ndarray  # [rows] bool, rows whose text went on in the step
    finished: np.ndarray  # [rows] bool, after the step
    num_text: np.ndarray | None = None  # [rows] emitted tokens without pads; None: there are none

    @property
    def of_text(self) -> Verdict:
        """The same without pads: every live row emits its accepted tokens and one more."""
        if self.num_text is None:
            return self
        num_tokens = np.where(self.live, self.num_text, 0)
        num_accepted = np.maximum(num_tokens - 1, 0)
        return replace(
            self,
            token_offsets=np.concatenate([[0], num_tokens.cumsum()]),
            token_ids=_heads(self.token_ids, self.token_offsets, num_tokens),
            path_offsets=np.concatenate([[0], num_accepted.cumsum()]),
            path=_heads(self.path, self.path_offsets, num_accepted),
            num_text=None,
        )

    def emitted(self, row: int) -> np.ndarray:
        """Tokens that the row emitted, `[num_emitted]`."""
        return self.token_ids[self.token_offsets[row] : self.token_offsets[row + 1]]

    def accepted(self, row: int) -> np.ndarray:
        """Accepted nodes of the row, root to leaf, `[num_accepted]`."""
        return self.path[self.path_offsets[row] : self.path_offsets[row + 1]]

    @property
    def num_accepted(self) -> np.ndarray:
        """Accepted nodes of each row, `[rows]`."""
        return np.diff(self.path_offsets)

    @property
    def num_emitted(self) -> np.ndarray:
        """Emitted tokens of each row, `[rows]`."""
        return np.diff(self.token_offsets)


def _heads(values: np.ndarray, offsets: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The first values of every row, row after row."""
    place = np.arange(len(values)) - np.repeat(offsets[:-1], np.diff(offsets))
    return values[place < np.repeat(counts, np.diff(offsets))]
