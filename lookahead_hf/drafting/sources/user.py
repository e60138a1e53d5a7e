"""Wraps a user's drafter: checks its trees, and passes it copies.

Compiled functions and verifiers trust the trees that they read, so every tree of a user is checked
here. An error raises here and costs the call this drafter, nothing else.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead_hf.config import drafter_name
from lookahead_hf.draft import DraftTree, Evidence
from lookahead_hf.drafting.drafter import Drafter, Step, Traits

if TYPE_CHECKING:
    import torch

    from lookahead_hf.rows import Rows

ROUNDING = 0.01  # Tolerated error of a sum of probabilities; half precision is off by up to 0.004


class UserDrafter(Drafter):
    """Wraps a user's object that has `propose` and perhaps other members of a `Drafter`."""

    def __init__(self, drafter: Any, vocab_size: int | None = None, draws: bool = True) -> None:
        """Read name and traits once; rejection sampling (`draws`) needs checked probabilities."""
        self.wrapped = drafter
        self._vocab_size, self._draws = vocab_size, draws
        self.name = drafter_name(drafter)  # type: ignore[misc]
        self.traits = getattr(drafter, "traits", Drafter.traits)
        if not isinstance(self.traits, Traits):
            raise ValueError(f"traits must be lookahead_hf.Traits, not {self.traits!r}")

    @property
    def kept_as(self) -> str:
        return f"{type(self.wrapped).__module__}.{type(self.wrapped).__qualname__}"

    def begin(self, rows: Rows) -> None:
        if isinstance(self.wrapped, Drafter):
            self.wrapped.rates = self.rates
        self._call("begin", rows.copied())

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        tree = self.wrapped.propose(rows.copied(), max_nodes)
        tree = checked(tree, rows.num_rows, self.traits.buckets)
        if tree.probs is None:
            return tree
        probs = _distributions(tree, self._vocab_size) if self._draws else None
        return replace(tree, probs=probs)

    def observe(self, step: Step) -> None:
        draft = copy.deepcopy(replace(step.draft, probs=None, drawn=None))
        verdict = copy.deepcopy(step.verdict)
        self._call("observe", replace(step, rows=step.rows.copied(), draft=draft, verdict=verdict))

    def begin_row(self, rows: Rows, row: int) -> None:
        if hasattr(self.wrapped, "begin_row"):
            self._call("begin_row", rows.copied(), row)
        else:
            self.begin(rows)

    def end_row(self, rows: Rows, row: int) -> None:
        self._call("end_row", rows.copied(), row)

    def end(self, rows: Rows) -> None:
        self._call("end", rows.copied())

    def _call(self, name: str, *arguments: Any) -> None:
        if (method := getattr(self.wrapped, name, None)) is not None:
            method(*arguments)


def checked(tree: Any, num_rows: int, num_buckets: int) -> DraftTree:
    """Return a user's tree with arrays of the right types; `depth` and `score` are not read.

    Unknown token ids are no error: merging drops them. ValueError if parts of it do not fit.
    """
    if not isinstance(tree, DraftTree):
        raise ValueError(f"propose() must return a DraftTree, not {type(tree).__name__}")
    tokens, parents = _integers("token_ids", tree.token_ids), _integers("parents", tree.parents)
    if len(parents) != len(tokens):
        raise ValueError(f"the tree has {len(tokens)} token ids and {len(parents)} parents")
    offsets = _offsets("row_offsets", tree.row_offsets, len(tokens))
    if len(offsets) != num_rows + 1:
        raise ValueError(f"the tree has {len(offsets) - 1} rows, the batch {num_rows}")
    rows = [slice(first, end) for first, end in itertools.pairwise(offsets.tolist())]
    built = DraftTree.from_rows((tokens[row].tolist(), parents[row].tolist()) for row in rows)
    evidence = _evidence(tree.evidence, len(tokens), num_buckets)
    return replace(built, evidence=evidence, probs=_probs(tree.probs, tokens))


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
    if evidence is None:
        return None
    buckets = _integers("evidence.bucket", evidence.bucket)
    offsets = _offsets("evidence.offsets", evidence.offsets, len(buckets))
    if len(offsets) != num_nodes + 1:
        raise ValueError(f"the evidence does not fit {num_nodes} nodes")
    if len(buckets) and not 0 <= buckets.min() <= buckets.max() < num_buckets:
        raise ValueError(
            f"evidence.bucket counts from 0 to {num_buckets - 1} (traits.buckets={num_buckets}), "
            f"but holds {buckets.min()} and {buckets.max()}"
        )
    return Evidence(offsets, np.zeros(len(buckets), np.int32), buckets.astype(np.int32))


def _probs(probs: Any, tokens: np.ndarray) -> Any:
    if probs is None:
        return None
    import torch  # only where a drafter draws: a list of drafters does not need torch

    if not isinstance(probs, torch.Tensor) or not probs.is_floating_point():
        raise ValueError(f"probs must be a float tensor [nodes, vocab], not {type(probs).__name__}")
    if probs.ndim != 2 or len(probs) != len(tokens) or (tokens >= probs.shape[1]).any():
        raise ValueError(
            f"probs must be [nodes, vocab] with every node's token in it, not "
            f"{list(probs.shape)} for {len(tokens)} nodes"
        )
    return probs


def _distributions(tree: DraftTree, vocab_size: int | None) -> torch.Tensor:
    """Return the distributions that the nodes were drawn from, [nodes, target's vocab].

    ValueError if they are no distributions, or exclude a node's token.
    """
    probs: torch.Tensor = tree.probs[:, :vocab_size].detach().float()  # type: ignore[index]
    totals, tokens = probs.sum(1), tree.token_ids.clip(0, probs.shape[1] - 1)
    chances = probs[np.arange(len(tokens)), tokens].cpu().numpy()
    is_drawn = (tokens == tree.token_ids) & (chances > 0)
    is_proper = (probs >= 0).all(1) & ((totals - 1).abs() <= ROUNDING)  # neither holds for NaN
    wrong = np.flatnonzero(~(is_drawn & is_proper.cpu().numpy()))
    if len(wrong):
        node = int(wrong[0])
        raise ValueError(
            f"node {node} holds the token {tree.token_ids[node]}, but probs[{node}] is not a "
            f"distribution over the target's {probs.shape[1]} tokens that it was drawn from: the "
            f"entries must not be negative, must sum up to 1, not {float(totals[node]):.4g}, and "
            "must give the token a chance"
        )
    return probs / totals[:, None]
