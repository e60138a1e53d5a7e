"""The weights that a step of a mixture of experts reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lookahead_hf import compat


class Experts(NamedTuple):
    """The experts of a model's layers."""

    num_experts: int  # in a layer
    per_token: int
    share: float  # their part of all parameters

    def growth(self, num_tokens: np.ndarray) -> np.ndarray:
        """Return how much a step of these tokens reads, relative to a step of one.

        Tokens choose their experts independently of each other, it is assumed.
        """
        others = 1 - self.share
        woken = 1 - (1 - self.per_token / self.num_experts) ** num_tokens  # part of the experts
        of_one = others + self.share * self.per_token / self.num_experts
        return np.asarray((others + self.share * woken) / of_one)


def experts_of(model: Any) -> Experts | None:
    """Return the experts of a model, None if it has none.

    Experts that its configuration does not count by a usual name are none.
    """
    of_experts = {
        id(parameter): parameter.numel()
        for name, module in model.named_modules()
        if "Experts" in type(module).__name__ and "shared" not in name.rpartition(".")[2]
        for parameter in module.parameters()
    }
    size = sum(of_experts.values())  # 0 also where other processes hold the weights
    count, per_token = compat.expert_counts(model) if size else (0, 0)
    if not 0 < per_token < count:
        return None
    total = sum(parameter.numel() for parameter in model.parameters())
    return Experts(count, per_token, size / total)
