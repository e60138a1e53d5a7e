"""The bits of the logits behind each part of a text."""

from __future__ import annotations

import torch

from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting.drafter import Step
from lookahead_hf.rows import Rows
from tests.helpers.drafts import Fixed

Bits = dict[tuple[int, ...], torch.Tensor]


class Listener(Fixed):
    """Drafts nothing, and keeps the logits behind each text."""

    def __init__(self) -> None:
        super().__init__(0.3)
        self.logits: Bits = {}

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        return DraftTree.empty(rows.num_rows)

    def observe(self, step: Step) -> None:
        for row in step.verdict.num_emitted.nonzero()[0].tolist():
            text = step.rows.context(row)[: -int(step.verdict.num_emitted[row])]
            self.logits[tuple(text.tolist())] = step.logits[row, 0].clone()


def same(one: Bits, other: Bits) -> bool:
    """Whether what both hold, at least the logits of the first step, has the same bits."""
    common = one.keys() & other.keys()
    return min(one, key=len) in common and all(torch.equal(one[key], other[key]) for key in common)
