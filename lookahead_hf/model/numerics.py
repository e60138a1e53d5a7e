"""The dtypes, device and attention that a model computes with at this moment."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lookahead_hf import compat
from lookahead_hf.model.facts import facts_of


class Numerics(NamedTuple):
    """What determines a model's numbers beside its weights; a self test holds for one of these."""

    dtype: torch.dtype
    device: torch.device
    autocast: torch.dtype | None  # that `torch.autocast` computes in on this thread
    matmul: str  # `torch.get_float32_matmul_precision()`
    attention: tuple[str, ...]  # names of the model's attention implementations

    @property
    def is_exact(self) -> bool:
        """Whether everything is computed in float32 or wider."""
        is_wide = self.dtype in (torch.float32, torch.float64)
        return is_wide and self.autocast is None and self.matmul == "highest"


def of_model(model: Any) -> Numerics:
    """Return the numerics of a model's forward on this thread now."""
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
