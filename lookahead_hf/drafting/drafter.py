"""The protocol of a drafter: what proposes the next tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from lookahead_hf.draft import DraftTree, Verdict

if TYPE_CHECKING:
    import torch

    from lookahead_hf.rows import Rows
    from lookahead_hf.runner.cuda.transfer import HostCopy


class Drafter(ABC):
    """Proposes the next tokens of every live row; the target decides which of them stand.

    A drafter of your own overrides `propose`, and the others where it has something to remember.
    One object serves one call at a time. An exception from any of them costs the call its speed,
    never its text. What they are given are copies, which they may write into; only what is no
    smaller for that, the logits of `observe`, is the step's own, of which all else was read.
    """

    name: ClassVar[str] = "custom"
    sees_all: ClassVar[bool] = True  # whether it needs steps, too, around which it is not asked
    rates: (
        np.ndarray
    )  # [num_buckets] float32: learned acceptance rates, kept up to date from outside

    @property
    def num_buckets(self) -> int:
        """Classes of proposals that this drafter tells apart; `Evidence.bucket` counts below it."""
        return 1

    @property
    def kept_as(self) -> str:
        """What learned rates are kept under between calls, beside the name: the class."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    def prior(self) -> np.ndarray:
        """Acceptance rate of each bucket before anything was learned, [num_buckets] float32."""
        return np.full(self.num_buckets, 0.3, np.float32)

    def begin(self, rows: Rows) -> None:  # noqa: B027 (an optional hook)
        """A call begins: the prompt stands in `rows`, and each row has emitted its first token."""

    @abstractmethod
    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        """Guess what comes after `rows.context(row)` for each row that is live.

        Args:
            rows: The texts so far.
            max_nodes: Most nodes that a row may have; what goes beyond is cut off.

        Returns:
            One tree per row (`DraftTree.from_chains` takes plain lists); finished rows get none.
        """

    def prepare(self, logits: torch.Tensor) -> None:  # noqa: B027 (an optional hook)
        """The forward of a step is launched, its verdict not known: device work can start here.

        Args:
            logits: As `observe` gets them, which follows in any case.
        """

    def bring(self, copy: HostCopy) -> None:  # noqa: B027 (an optional hook)
        """Add what `observe` needs on the host to the one copy that brings the step's verdict.

        Called after `prepare`, where steps are verified on the device.
        """

    def observe(  # noqa: B027 (an optional hook)
        self, rows: Rows, draft: DraftTree, verdict: Verdict, logits: torch.Tensor
    ) -> None:
        """A step was decided; `rows` holds the emitted tokens already.

        Args:
            rows: The texts so far.
            draft: What was verified.
            verdict: What was accepted and emitted.
            logits: The target's raw logits, [rows, 1 + max nodes, vocab]: index 0 follows the last
                token, index 1 + i follows node i of the row. Valid during this call only.
        """

    def end(self, rows: Rows) -> None:  # noqa: B027 (an optional hook)
        """The call is over, also when it ended with an exception."""
