"""Rejection sampling: plain's distribution, but not plain's sample for a seed.

A draft token that was drawn from `q` is accepted with probability `min(1, p / q)`, where `p` is the
target's processed distribution; where it is rejected, its next sibling is tried on what `p` has
beyond `q`, and where none is left the recovered token is drawn from that (Leviathan et al.,
arXiv:2211.17192; siblings as in SpecInfer, arXiv:2305.09781). The rule is `kernels.reject_tree`.

If the kernel runs and `NodeProcessors` can apply the processors, one launch walks the trees of all
rows. Otherwise the rule is applied to each node that the walk reaches, with any processors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from lookahead_hf import kernels
from lookahead_hf.draft import DraftTree, place_in_row
from lookahead_hf.kernels.data import TreeWalk
from lookahead_hf.rows import Rows
from lookahead_hf.runner.outputs import pinned
from lookahead_hf.verification.node_processors import NodeProcessors, admits
from lookahead_hf.verification.noise import refuse_unless
from lookahead_hf.verification.walk import Choice, Decide, DecideStep, Rules, along


def rejecting(rules: Rules) -> DecideStep:
    """Return how the rows of a sampled batch decide by `DraftTree.probs`.

    Drawn siblings come first, in the order in which they were drawn. A node without probabilities
    counts as drawn with probability 1, correct for any token. The default generator decides.
    """
    processors = rules.processors
    is_simple = processors.all_known and admits(processors) and not rules.emitter.outputs.chooses
    processed = NodeProcessors(processors) if is_simple else None

    def of_step(
        _: Callable[[int], Rules], rows: Rows, draft: DraftTree, logits: torch.Tensor
    ) -> Callable[[int], Decide]:
        if processed is not None and kernels.backend(logits.device) == "triton":
            scores = logits[:, : 1 + draft.max_nodes].to(copy=True, dtype=torch.float32)
            return _at_once(draft, processed(rows, draft, scores).softmax(-1))
        return partial(_node_by_node, rules, rows, draft, logits)

    return of_step


def _node_by_node(
    rules: Rules, rows: Rows, draft: DraftTree, logits: torch.Tensor, row: int
) -> Decide:
    nodes = draft.row(row)
    parents, drafted = draft.parents[nodes], draft.token_ids[nodes]

    def decide(node: int) -> Choice:
        probs = rules.score(rows, row, logits[row, node + 1]).softmax(-1)[0]
        children = np.flatnonzero(parents == node)
        drawn = _rows_of_probs(draft)[nodes.start + children]
        which, ids = _upload(drawn, drafted[children], device=probs.device)
        drawn_from = _drawn_from(draft.probs, which, ids, probs)
        accepted, token = choose(probs, drafted[children], drawn_from)
        return Choice(token, None if accepted is None else int(children[accepted]))

    return decide


def _at_once(draft: DraftTree, probs: torch.Tensor) -> Callable[[int], Decide]:
    """Walk the trees of all rows by probabilities, [rows, 1 + nodes, vocab]; return their paths."""
    width, counts = probs.shape[1], np.diff(draft.row_offsets)
    of_nodes = np.repeat(np.arange(len(counts)), counts), place_in_row(draft.row_offsets)
    *tree, row, place, which, ids = _upload(
        *(*draft.padded(width)[:2], counts, *of_nodes, _rows_of_probs(draft), draft.token_ids),
        device=probs.device,
    )
    drawn_from = probs.new_zeros(len(probs), width - 1, probs.shape[2])
    drawn_from[row, place] = _drawn_from(draft.probs, which, ids, probs)
    walk = _reject(probs, drawn_from, *tree)
    walked = torch.cat([walk.packed, _is_distribution(probs)], 1).cpu().numpy()

    def of_row(row: int) -> Decide:
        path, is_distribution = np.split(walked[row], [3 + draft.max_nodes])
        return along(path, draft.token_ids[draft.row(row)], is_distribution)

    return of_row


def _upload(*arrays: np.ndarray, device: torch.device) -> list[torch.Tensor]:
    packed = np.concatenate([array.ravel() for array in arrays], dtype=np.int64)
    there = pinned(packed, device).to(device, non_blocking=True)
    parts = there.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def choose(
    probs: torch.Tensor,  # [vocab]
    drafted: np.ndarray,  # [siblings] integers
    drawn_from: torch.Tensor,  # [siblings, vocab]
) -> tuple[int | None, int]:
    """Choose the next token, if possible one of those drafted, which are in drawn order.

    Each was drawn from a distribution given the tokens before it. Returns which of them was
    accepted, None if none was, and the token.
    """
    siblings = len(drafted)
    refuse_unless(bool(_is_distribution(probs)))
    tree = np.zeros((2, 1, 1 + siblings), np.int64)
    tree[0, 0, 1:], tree[1, 0, 0] = drafted, -1
    tokens, parents = _upload(*tree, device=probs.device)
    count = torch.full((1,), siblings, device=probs.device)
    # The distributions behind the siblings are not used, so any will do.
    everywhere = probs.expand(1, 1 + siblings, -1)
    walk = _reject(everywhere, drawn_from[None], tokens, parents, count)
    accepted, token, _, child, *_ = [*walk.packed[0].tolist(), 0]
    return (child - 1, int(drafted[child - 1])) if accepted else (None, token)


def _reject(
    probs: torch.Tensor,  # [rows, 1 + nodes, vocab]
    drawn_from: torch.Tensor,  # [rows, nodes, vocab]
    tokens: torch.Tensor,  # [rows, 1 + nodes]
    parents: torch.Tensor,  # [rows, 1 + nodes]
    num_nodes: torch.Tensor,  # [rows]
) -> TreeWalk:
    uniforms = torch.rand(drawn_from.shape[:2], device=probs.device)
    noise = torch.empty_like(probs[:, 0]).exponential_()
    return kernels.reject_tree(probs, drawn_from, tokens, parents, num_nodes, uniforms, noise)


def _is_distribution(probs: torch.Tensor) -> torch.Tensor:  # [..., vocab] -> [...]
    """Return 1 where a softmax gave finite numbers; if one is not finite, none is."""
    return probs[..., 0].isfinite().long()


def _rows_of_probs(draft: DraftTree) -> np.ndarray:
    """Return the row of `draft.probs` that each node was drawn from, -1 for certain nodes."""
    return np.arange(draft.num_nodes) if draft.drawn is None else draft.drawn


def _drawn_from(
    known: Any,  # [any, any] or None
    which: torch.Tensor,  # [nodes], rows of `known`, -1 for certain nodes
    ids: torch.Tensor,  # [nodes]
    like: torch.Tensor,  # [..., vocab]
) -> torch.Tensor:
    """Return what nodes were drawn from, like `like`, [nodes, vocab]; 1 where that is not known."""
    certain = torch.zeros(len(ids), like.shape[-1], device=like.device).scatter_(1, ids[:, None], 1)
    if known is None or not len(known):
        return certain
    chances = known[which.clamp(min=0).to(known.device), : like.shape[-1]].to(like)
    chances = torch.nn.functional.pad(chances, (0, like.shape[-1] - chances.shape[1]))
    return torch.where((which >= 0)[:, None], chances, certain)
