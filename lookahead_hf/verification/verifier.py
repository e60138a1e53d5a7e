"""What decides each step of a call, and tells other processes what it decided."""

from __future__ import annotations

from typing import Any

import torch

from lookahead_hf.distributed.coordinator import Processes
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.rows import Rows


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
        """Emit the token after the prompt.

        Args:
            rows: The texts.
            logits: Logits after the prompt, [rows, 1, vocab].
        """
        return self._decide(rows, DraftTree.empty(rows.num_rows), logits)

    def complete(self, rows: Rows, draft: DraftTree) -> DraftTree:
        """Return the draft with what verification needs in addition."""
        return draft

    def read(self, rows: Rows, draft: DraftTree, step: Any) -> Verdict:
        """Decide a step, append its tokens to the rows and mark the rows that end.

        Args:
            rows: The texts.
            draft: What was fed behind the last tokens.
            step: What the runner's `launch` returned.
        """
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
        """Append one more pad to a finished row, as plain does until the last row ends.

        Args:
            rows: The texts.
            row: The finished row.
            logits: The target's logits after the row's newest token, [vocab].
        """
        raise NotImplementedError  # in lockstep, where the steps append the pads

    def end(self, rows: Rows) -> None:
        """Leave the default random generator where plain leaves it after the shown tokens."""
