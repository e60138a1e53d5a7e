"""Verification on the device: the walk is part of the step, and the host reads its outcome."""

from __future__ import annotations

import torch

from lookahead_hf.draft import DraftTree
from lookahead_hf.rows import Rows
from lookahead_hf.runner.outputs import Scores, Scoring
from lookahead_hf.verification.batched_walk import BatchedWalk
from lookahead_hf.verification.node_processors import NodeProcessors
from lookahead_hf.verification.walk import Rules


def serves(device: torch.device) -> bool:
    """Return whether calls are verified on the device; on a CPU that would gain nothing."""
    return device.type == "cuda"


class Device(BatchedWalk):
    """Reads the accepted paths from the device and emits them.

    The first token, which has no step, is chosen as in a batched walk.
    """

    name = "device"

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._processed = NodeProcessors(rules.processors)

    @property
    def scoring(self) -> Scoring | None:
        alters = self.rules.do_sample or not self.rules.processors.empty
        return self.scores if alters else None

    def scores(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Scores:
        """Return the processed scores of a step from its logits, [rows, width, vocab]."""
        scores, noise = logits.to(copy=True, dtype=torch.float32), self.rules.noise
        scores = self._processed(rows, draft, scores)
        if noise is None:
            return Scores(scores)
        probs = scores.softmax(-1)
        depths = int(draft.depth.max(initial=0)) + 1
        return Scores(
            probs, noise.blocks(rows.num_emitted, depths), probs.amax(-1).isfinite().long()
        )
