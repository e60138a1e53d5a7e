"""The outputs of a step, and the scores that a device chooses its tokens from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lookahead_hf.draft import DraftTree
from lookahead_hf.rows import Rows
from lookahead_hf.runner import non_finite
from lookahead_hf.runner.transfer import HostCopy, PendingCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """A launched step.

    Attributes:
        logits: The target's, [rows, width, vocab]; valid until the next step.
        of_model: What the model's forward returned, None if the step stays on a device.
        hidden_states: The target's last ones, [rows, width, hidden], if a drafter reads them; valid
            until the next step.
    """

    logits: torch.Tensor
    of_model: Any = None
    hidden_states: torch.Tensor | None = None

    def count_nan(self) -> np.ndarray:
        """Count NaN in a sample of the logits of each row, [rows]."""
        return non_finite.has_nan(self.logits).cpu().numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOutputs(StepOutputs):
    """A launched step that is verified on a device.

    Attributes:
        copy: Brings further tensors of the step to the host.
        walk: `TreeWalk.packed`, [rows, 2 + width].
        num_nan: What `count_nan` returns, [rows].
        is_finite: As in `Scores`.
    """

    copy: HostCopy
    walk: PendingCopy
    num_nan: PendingCopy
    is_finite: PendingCopy | None

    def count_nan(self) -> np.ndarray:
        return self.num_nan.take()


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores that a device chooses the tokens of a step from.

    Attributes:
        values: Processed logits, or probabilities, [rows, width, vocab].
        noise: Noise by depth, given with probabilities, [rows, depths, vocab].
        is_finite: Whether all probabilities of a node are finite, [rows, width] int64.
    """

    values: torch.Tensor
    noise: torch.Tensor | None = None
    is_finite: torch.Tensor | None = None


Scoring = Callable[[Rows, DraftTree, torch.Tensor], Scores]
"""Turns `(rows, draft, logits [rows, width, vocab])` into scores."""
