"""A tiny model whose tokens are nearly tied."""

from __future__ import annotations

import copy
from typing import Any

import torch


def unsure(model: Any, noise: float = 0.1) -> Any:
    """A copy of a model that mostly, but not always, writes the same."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            spread = noise * parameter.std() if parameter.numel() > 1 else 0.0
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    return other
