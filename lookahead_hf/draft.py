"""The data of a step: the draft tree and the verdict on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import numpy as np

ROOT = -1  # Parent of the nodes that directly follow a row's last emitted token


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Which sources proposed each node, in compressed rows over the nodes.

    A node has one entry for each source that proposed it. A bucket is the source's own class of
    proposals (a match length, a rank); calibration learns its acceptance rate.
    """

    offsets: np.ndarray  # [nodes + 1] int64
    source: np.ndarray  # [entries] int32, index into the drafter's list of sources
    bucket: np.ndarray  # [entries] int32


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Draft tokens of all rows, row after row; every parent comes before its children.

    Row `r` owns the nodes `row_offsets[r]:row_offsets[r + 1]`; `parents` counts within the row.

    `probs`, for verification="rejection", holds the distribution over the target's tokens that each
    node's token was drawn from. It counts on the path of first children, whose length must not
    depend on what is drawn there. All other nodes are certain: they may hold any tokens.
    """

    row_offsets: np.ndarray  # [rows + 1] int64
    token_ids: np.ndarray  # [nodes] int64
    parents: np.ndarray  # [nodes] int32, ROOT for children of the last emitted token
    depth: np.ndarray  # [nodes] int32, 1 for children of the last emitted token
    score: np.ndarray  # [nodes] float32, estimated probability that its path is accepted
    evidence: Evidence | None = None
    probs: object | None = None  # torch.Tensor [nodes, vocab], what each node was drawn from
    drawn: np.ndarray | None = None  # [nodes], rows of `probs`, -1 if certain; None: each its own

    @property
    def num_rows(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    def row(self, row: int) -> slice:
        """Return the nodes of one row as a slice of the flat arrays."""
        return slice(int(self.row_offsets[row]), int(self.row_offsets[row + 1]))

    @property
    def max_nodes(self) -> int:
        """Number of nodes of the largest row."""
        return int(np.diff(self.row_offsets).max(initial=0))

    def padded(self, width: int, last_tokens: np.ndarray | None = None) -> np.ndarray:
        """Lay the rows out as blocks of one width: first the last token, then the row's nodes.

        Args:
            width: Tokens per row, at least `1 + max_nodes`.
            last_tokens: The last token of each row, [rows]; without them their ids are 0.

        Returns:
            Token ids, parents and depths, [3, rows, width] int64, with node `i` of a row at `1 +
                i`. Parents are such indices too, -1 for the last token and for padding, which
                repeats the last token (the model has an embedding for it) at depth 0.
        """
        fields = np.zeros((3, self.num_rows, width), np.int64)
        fields[0] = 0 if last_tokens is None else last_tokens[:, None]
        fields[1] = -1
        row = np.repeat(np.arange(self.num_rows), np.diff(self.row_offsets))
        nodes = self.token_ids, self.parents + 1, self.depth
        fields[:, row, 1 + place_in_row(self.row_offsets)] = nodes
        return fields

    def child_of(self, row: int, node: int, token: int) -> int | None:
        """Return the child of a node (or of `ROOT`) that holds the token, None if there is none."""
        nodes = self.row(row)
        found = np.flatnonzero((self.parents[nodes] == node) & (self.token_ids[nodes] == token))
        return int(found[0]) if len(found) else None

    def with_buckets(self, buckets: np.ndarray, offsets: np.ndarray | None = None) -> DraftTree:
        """Return the same tree with the evidence of its only source.

        Args:
            buckets: Bucket of each node; with `offsets` of each entry, [entries].
            offsets: Offset of each node's entries, [nodes + 1]; by default a node has one entry.
        """
        buckets = np.asarray(buckets, np.int32)
        offsets = np.arange(self.num_nodes + 1) if offsets is None else offsets
        return replace(self, evidence=Evidence(offsets, np.zeros_like(buckets), buckets))

    def with_chains(self, tokens: np.ndarray, rows: np.ndarray) -> DraftTree:
        """Return the tree with a chain, [tokens], added to rows without nodes, [rows] bool."""
        counts = np.where(rows, len(tokens), np.diff(self.row_offsets))
        at = np.repeat(self.row_offsets[:-1][rows], len(tokens))
        depth = np.arange(1, len(tokens) + 1)

        def with_new(held: np.ndarray, added: np.ndarray) -> np.ndarray:
            return np.insert(held, at, np.tile(added, int(rows.sum())))

        evidence = self.evidence
        if evidence is not None:
            offsets = np.insert(evidence.offsets, at, evidence.offsets[at])
            evidence = replace(evidence, offsets=offsets)
        return DraftTree(
            np.concatenate([[0], counts.cumsum()]),
            with_new(self.token_ids, tokens),
            with_new(self.parents, depth - 2),
            with_new(self.depth, depth),
            with_new(self.score, np.zeros(len(tokens))),
            evidence,
        )

    @staticmethod
    @cache
    def empty(num_rows: int) -> DraftTree:
        """Return no draft for any row, the same object every time."""
        return DraftTree.from_rows([((), ())] * num_rows)

    @staticmethod
    def from_rows(rows: Iterable[tuple[Sequence[int], Sequence[int]]]) -> DraftTree:
        """Build a tree from `(token_ids, parents)` per row.

        Raises:
            ValueError: A parent does not come before its child.
        """
        offsets, tokens, parents, depth = [0], list[int](), list[int](), list[int]()
        for row_tokens, row_parents in rows:
            row_depth: list[int] = []
            for node, parent in enumerate(row_parents):
                if not ROOT <= parent < node:
                    raise ValueError(
                        f"node {node} has the parent {parent}: a parent must come before its child "
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
        """Build a tree from any number of continuations per row, which share common prefixes."""
        drafts = []
        for chains in rows:
            drafts.append(draft := RowDraft())
            for continuation in chains:
                node = ROOT
                for token in continuation:
                    node = draft.child(node, int(token))
        return DraftTree.from_rows((draft.tokens, draft.parents) for draft in drafts)

    @staticmethod
    def from_drafts(rows: Sequence[RowDraft]) -> DraftTree:
        """Build a tree from the drafts of the rows, with their scores and buckets."""
        tree = DraftTree.from_rows((row.tokens, row.parents) for row in rows)
        scores = [score for row in rows for score in row.scores]
        tree = replace(tree, score=np.array(scores, np.float32))
        return tree.with_buckets(np.array([b for row in rows for b in row.buckets], np.int32))


class RowDraft:
    """A row's draft under construction: a list per field. Common prefixes share nodes."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.buckets: list[int] = []
        self.scores: list[float] = []
        self._nodes: dict[tuple[int, int], int] = {}

    def depth_below(self, parent: int) -> int:
        return 1 if parent == ROOT else self.depths[parent] + 1

    def child(self, parent: int, token: int, bucket: int = 0, score: float = 1.0) -> int:
        """Return the child of a node (or of `ROOT`) that holds the token, added if missing."""
        node = self._nodes.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.depths.append(self.depth_below(parent))
            self.tokens.append(token)
            self.parents.append(parent)
            self.buckets.append(bucket)
            self.scores.append(score)
        return node


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """The outcome of a step: the accepted path and the emitted tokens of each row.

    A live row emits its accepted tokens and one bonus token. Where the text stops inside the path,
    its last token takes the place of the bonus token. Other rows emit nothing, or pads in lockstep.
    `path` is what the cache keeps, so it includes pads, also those after a text that ends within
    the step.
    """

    token_offsets: np.ndarray  # [rows + 1] int64
    token_ids: np.ndarray  # [emitted] int64
    path_offsets: np.ndarray  # [rows + 1] int64
    path: np.ndarray  # [accepted] int32, node indices within the row, from the root down
    live: np.ndarray  # [rows] bool, rows whose text went on in the step
    finished: np.ndarray  # [rows] bool, after the step
    num_text: np.ndarray | None = None  # [rows] emitted tokens that are no pads; None: all of them

    @staticmethod
    def from_rows(
        token_ids: Sequence[Sequence[int]],
        paths: Sequence[Sequence[int]],
        live: np.ndarray | None = None,
        finished: np.ndarray | None = None,
        num_text: np.ndarray | None = None,
    ) -> Verdict:
        """Build a verdict from the emitted tokens and the accepted nodes of each row.

        Args:
            token_ids: Emitted tokens by row.
            paths: Accepted nodes by row, root to leaf.
            live: Rows whose text went on, [rows] bool; by default those that emit something.
            finished: Rows whose text has ended, [rows] bool; by default none.
            num_text: Emitted tokens of each row that are no pads, [rows]; by default all.
        """
        emits = np.array([len(tokens) > 0 for tokens in token_ids], bool)
        return Verdict(
            np.cumsum([0, *map(len, token_ids)]),
            np.array(list(chain.from_iterable(token_ids)), np.int64),
            np.cumsum([0, *map(len, paths)]),
            np.array(list(chain.from_iterable(paths)), np.int32),
            emits if live is None else live,
            np.zeros(len(emits), bool) if finished is None else finished,
            num_text,
        )

    @property
    def of_text(self) -> Verdict:
        """The same verdict without pads: every live row emits its accepted tokens and one more."""
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
        """Return the tokens that the row emitted, `[num_emitted]`."""
        return self.token_ids[self.token_offsets[row] : self.token_offsets[row + 1]]

    def accepted(self, row: int) -> np.ndarray:
        """Return the accepted nodes of the row, root to leaf, `[num_accepted]`."""
        return self.path[self.path_offsets[row] : self.path_offsets[row + 1]]

    @property
    def num_accepted(self) -> np.ndarray:
        """Accepted nodes of each row, `[rows]`."""
        return np.diff(self.path_offsets)

    @property
    def num_emitted(self) -> np.ndarray:
        """Emitted tokens of each row, `[rows]`."""
        return np.diff(self.token_offsets)


def place_in_row(offsets: np.ndarray) -> np.ndarray:
    """Number the entries of every row from 0 on: [rows + 1] -> [entries]."""
    return np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))


def _heads(values: np.ndarray, offsets: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return values[place_in_row(offsets) < np.repeat(counts, np.diff(offsets))]
