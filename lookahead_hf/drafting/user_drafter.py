"""A drafter of the user's among ours: what it says of itself and proposes is looked at before use.

The compiled functions and the engines read what stands in a tree without looking back. So nothing
that a user's object returns goes further unchecked; what is wrong raises here, which costs the call
this drafter and nothing else. And what it is shown it is shown in copies: it may write into all of
them, and the text, the verdict and the other drafters stay what they are.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lookahead_hf.config import drafter_name
from lookahead_hf.draft import ROOT, DraftTree, Evidence, Verdict, place_in_row
from lookahead_hf.drafting.drafter import Drafter

if TYPE_CHECKING:
    import torch

    from lookahead_hf.rows import Rows
    from lookahead_hf.runner.cuda.transfer import HostCopy

_Record = TypeVar("_Record", DraftTree, Verdict)

ROUNDING = 0.01
"""How far from 1 probabilities may sum up; half precision is off by up to 0.004."""


class Adapted(Drafter):
    """A user's object that has `propose`, and perhaps more of what a `Drafter` has."""

    def __init__(self, drafter: Any, vocab_size: int | None = None, draws: bool = True) -> None:
        """Ask the object once for what it says of itself.

        Args:
            drafter: The object.
            vocab_size: Token ids of the target.
            draws: Whether the call verifies what was drawn by the probabilities that it was drawn
                with; what is said of these is looked at only then.

        Raises:
            ValueError: It has no right number of buckets, or no prior for each of them.
            Exception: Whatever the object raises.
        """
        self._drafter = drafter
        self._vocab_size, self._draws = vocab_size, draws
        self.name = drafter_name(drafter)  # type: ignore[misc]
        self.sees_all = bool(getattr(drafter, "sees_all", True))  # type: ignore[misc]
        self._num_buckets = _num_buckets(getattr(drafter, "num_buckets", 1))
        prior = getattr(drafter, "prior", None)
        self._prior = super().prior() if prior is None else _prior(prior(), self._num_buckets)
        self.rates = self._prior

    @property
    def num_buckets(self) -> int:
        return self._num_buckets

    @property
    def kept_as(self) -> str:
        return f"{type(self._drafter).__module__}.{type(self._drafter).__qualname__}"

    def prior(self) -> np.ndarray:
        return self._prior

    @property
    def rates(self) -> np.ndarray:
        """The object's own, where it is a `Drafter`."""
        return self._rates

    @rates.setter
    def rates(self, rates: np.ndarray) -> None:
        self._rates = rates
        if isinstance(self._drafter, Drafter):
            self._drafter.rates = rates

    def begin(self, rows: Rows) -> None:
        if begin := self._own("begin"):
            begin(rows.copied())

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        tree = self._drafter.propose(rows.copied(), max_nodes)
        tree = checked(tree, rows.num_rows, self._num_buckets)
        if tree.probs is None:
            return tree
        # By its buckets what was drawn would decide whether it is verified: all nodes are of one.
        probs = _distributions(tree, self._vocab_size) if self._draws else None
        evidence = None if self._draws else tree.evidence
        return replace(tree, evidence=evidence, probs=probs)

    def prepare(self, logits: torch.Tensor) -> None:
        if prepare := self._own("prepare"):
            prepare(logits.clone())  # the verdict is still to be read from them

    def bring(self, copy: HostCopy) -> None:
        if bring := self._own("bring"):
            bring(copy)

    def observe(self, rows: Rows, draft: DraftTree, verdict: Verdict, logits: torch.Tensor) -> None:
        if observe := self._own("observe"):
            observe(rows.copied(), _copied(draft), _copied(verdict), logits)

    def end(self, rows: Rows) -> None:
        if end := self._own("end"):
            end(rows.copied())

    def _own(self, name: str) -> Any:
        """A method that the object has beyond what every `Drafter` inherits; None without one."""
        method = getattr(self._drafter, name, None)
        inherited = getattr(method, "__func__", None) is getattr(Drafter, name)
        return None if inherited else method


def _copied(record: _Record) -> _Record:
    """The same with arrays of its own."""
    own: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        own[field.name] = value.copy() if isinstance(value, np.ndarray) else value
    return type(record)(**own)


def _num_buckets(given: Any) -> int:
    if not isinstance(given, (int, np.integer)) or isinstance(given, bool) or given < 1:
        raise ValueError(f"num_buckets must be an int from 1 on, not {given!r}")
    return int(given)


def _prior(given: Any, num_buckets: int) -> np.ndarray:
    rates = np.asarray(given)
    if rates.shape != (num_buckets,) or rates.dtype.kind not in "iuf":
        raise ValueError(f"prior() must return {num_buckets} rates, one per bucket, not {given!r}")
    if not ((rates >= 0) & (rates <= 1)).all():
        raise ValueError(f"prior() must return rates between 0 and 1, not {given!r}")
    return rates.astype(np.float32)


def checked(tree: Any, num_rows: int, num_buckets: int) -> DraftTree:
    """A user's tree with arrays as ours have them.

    Token ids that the target does not have are no error: they are left out when trees are merged.

    Args:
        tree: What `propose` returned; sequences stand for arrays, `depth` and `score` are not read.
        num_rows: Rows of the batch.
        num_buckets: Buckets of the drafter.

    Raises:
        ValueError: Its parts do not fit together, or a parent does not stand before its child.
    """
    if not isinstance(tree, DraftTree):
        raise ValueError(f"propose() must return a DraftTree, not {type(tree).__name__}")
    tokens, parents = _integers("token_ids", tree.token_ids), _integers("parents", tree.parents)
    if len(parents) != len(tokens):
        raise ValueError(f"the tree has {len(tokens)} token ids and {len(parents)} parents")
    offsets = _offsets("row_offsets", tree.row_offsets, len(tokens))
    if len(offsets) != num_rows + 1:
        raise ValueError(f"the tree has {len(offsets) - 1} rows, the batch {num_rows}")
    node = place_in_row(offsets)
    wrong = np.flatnonzero((parents < ROOT) | (parents >= node))
    if len(wrong):
        raise ValueError(
            f"node {node[wrong[0]]} names parent {parents[wrong[0]]}: a parent must stand before "
            f"its child in the row (or be {ROOT}, the row's last emitted token)"
        )
    return DraftTree(
        offsets,
        tokens,
        parents.astype(np.int32),
        np.ones(len(tokens), np.int32),
        np.ones(len(tokens), np.float32),
        _evidence(tree.evidence, len(tokens), num_buckets),
        _probs(tree.probs, tokens),
    )


def _integers(name: str, given: Any) -> np.ndarray:
    array = np.asarray(given)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{name} must be a list or array of integers, not of type {array.dtype} and shape "
            f"{list(array.shape)}"
        )
    return array.astype(np.int64)


def _offsets(name: str, given: Any, last: int) -> np.ndarray:
    offsets = _integers(name, given)
    rises = len(offsets) and offsets[0] == 0 and offsets[-1] == last
    if not rises or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"{name} must rise from 0 to {last}, not {offsets.tolist()}")
    return offsets


def _evidence(evidence: Any, num_nodes: int, num_buckets: int) -> Evidence | None:
    """A user's evidence; which source it is from is known here better than there."""
    if evidence is None:
        return None
    buckets = _integers("evidence.bucket", evidence.bucket)
    offsets = _offsets("evidence.offsets", evidence.offsets, len(buckets))
    if len(offsets) != num_nodes + 1:
        raise ValueError(f"the evidence does not fit {num_nodes} nodes")
    if len(buckets) and not 0 <= buckets.min() <= buckets.max() < num_buckets:
        raise ValueError(
            f"evidence.bucket counts from 0 to {num_buckets - 1} (num_buckets={num_buckets}), but "
            f"holds {buckets.min()} and {buckets.max()}"
        )
    return Evidence(offsets, np.zeros(len(buckets), np.int32), buckets.astype(np.int32))


def _probs(probs: Any, tokens: np.ndarray) -> Any:
    """What the nodes were drawn from; each node's token must be one that could be drawn."""
    if probs is None:
        return None
    import torch  # not before a drafter draws: listing drafters takes no torch

    if not isinstance(probs, torch.Tensor) or not probs.is_floating_point():
        raise ValueError(f"probs must be a float tensor [nodes, vocab], not {type(probs).__name__}")
    if probs.ndim != 2 or len(probs) != len(tokens) or (tokens >= probs.shape[1]).any():
        raise ValueError(
            f"probs must be [nodes, vocab] with every node's token in it, not "
            f"{list(probs.shape)} for {len(tokens)} nodes"
        )
    return probs


def _distributions(tree: DraftTree, vocab_size: int | None) -> torch.Tensor:
    """What each node was drawn from, as distributions of the target's tokens, [nodes, vocab].

    Raises:
        ValueError: They are none, or a node cannot be what was drawn from its one.
    """
    probs: torch.Tensor = tree.probs[:, :vocab_size].detach().float()  # type: ignore[index]
    totals = probs.sum(1)
    proper = (probs >= 0).all(1) & ((totals - 1).abs() <= ROUNDING)  # neither holds for NaN
    if not proper.all():
        node = int(proper.logical_not().nonzero()[0])
        raise ValueError(
            f"probs[{node}] is no distribution of the target's {probs.shape[1]} tokens: its "
            f"entries must not be negative and must sum up to 1, not {float(totals[node]):.4g}"
        )
    known = (tree.token_ids >= 0) & (tree.token_ids < probs.shape[1])
    chances = probs.new_zeros(tree.num_nodes)
    chances[np.flatnonzero(known)] = probs[np.flatnonzero(known), tree.token_ids[known]]
    if not (chances > 0).all():
        node = int((chances <= 0).nonzero()[0])
        raise ValueError(
            f"node {node} holds the token {tree.token_ids[node]}, which probs[{node}] gives no "
            "probability, so that it was not drawn from it"
        )
    later, earlier = _siblings(tree)
    if len(later) and bool((again := probs[later, tree.token_ids[earlier]] > 0).any()):
        node = int(later[int(again.nonzero()[0])])
        raise ValueError(
            f"probs[{node}] gives probability to the token of a sibling before it: siblings must "
            "be drawn without replacement, each from what those before it leave"
        )
    return probs / totals[:, None]


def _siblings(tree: DraftTree) -> tuple[np.ndarray, np.ndarray]:
    """Every pair of siblings, as flat nodes: the later and the earlier one of each, [pairs]."""
    pairs: list[tuple[int, int]] = []
    for row in range(tree.num_rows):
        nodes = tree.row(row)
        parents = tree.parents[nodes]
        later, earlier = np.nonzero(np.tril(parents[:, None] == parents, -1))
        pairs += zip((later + nodes.start).tolist(), (earlier + nodes.start).tolist(), strict=True)
    later, earlier = np.array(pairs, np.int64).reshape(-1, 2).T
    return later, earlier
