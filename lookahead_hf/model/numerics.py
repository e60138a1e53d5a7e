"""In which types, where and by which attention a model computes at this moment."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lookahead_hf import compat
from lookahead_hf.model.facts import facts_of


class Numerics(NamedTuple):
    """What decides about a model's numbers beside its weights: verdicts on them hold for one of it.

    Attributes:
        dtype: Type of the weights.
        device: Where the model is.
        autocast: Type that `torch.autocast` computes in on this thread, None without it.
        matmul: `torch.get_float32_matmul_precision()`.
        attention: Names of the model's attention implementations.
    """

    dtype: torch.dtype
    device: torch.device
    autocast: torch.dtype | None
    matmul: str
    attention: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Whether numbers are rounded as those of float32 or more."""
        is_wide = self.dtype in (torch.float32, torch.float64)
        return is_wide and self.autocast is None and self.matmul == "highest"


def of_model(model: Any) -> Numerics:
    """Return what a forward of a model would compute with now."""
    kind = model.device.type  # "meta" where weights are elsewhere between forwards
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    names = (compat.attention_name(config) for config in facts_of(model).attention_configs)
    return Numerics(
        model.dtype,
        model.device,
        torch.get_autocast_dtype(kind) if casts else None,
        torch.get_float32_matmul_precision(),
        tuple((name or "").removeprefix("lookahead:") for name in names),
    )
