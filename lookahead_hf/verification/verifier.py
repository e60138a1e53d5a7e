"""The interface of verifiers, which decide steps and tell other processes."""

from __future__ import annotations

from typing import Any

import torch

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.rows import Rows
from lookahead_hf.runner.processes import Processes


class Verifier:
    """Decides which draft tokens are accepted, and emits the tokens of each step.

    Attributes:
        name: The engine's name in statistics.
    """

    name = ""

    def __init__(self, processes: Processes | None = None) -> None:
        """`processes`: who decides if several of them run the model."""
        self._processes = processes or Processes()

    def first(self, rows: Rows, logits: torch.Tensor) -> Verdict:
        """Emit the token after the prompt, from the logits there, [rows, 1, vocab]."""
        return self._decide(rows, DraftTree.empty(rows.num_rows), logits)

    def complete(self, rows: Rows, draft: DraftTree) -> DraftTree:
        """Return the draft with the nodes that verification needs in addition."""
        return draft

    def read(self, rows: Rows, draft: DraftTree, step: Any) -> Verdict:
        """Decide a step that the runner's `launch` returned, and emit its tokens."""
        return self._decide(rows, draft, step.logits)

    def _decide(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        self._processes.ready()
        verdict = self.verify(rows, draft, logits)
        self._processes.decided(rows, verdict)
        return verdict

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        """Decide a step from the target's logits, [rows, 1 + most nodes, vocab]; see `read`."""
        raise NotImplementedError

    def feed_pad(self, rows: Rows, row: int, logits: torch.Tensor) -> None:
        """Append a pad to a finished row, as plain does until the last row ends.

        `logits`, [vocab], are the target's after the row's newest token.
        """
        raise NotImplementedError  # in lockstep, where the steps append the pads

    def end(self, rows: Rows) -> None:
        """Leave the default random generator as plain does after the tokens that were shown."""
