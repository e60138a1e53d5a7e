"""What a call is asked to return beside the text, and how two such outputs are compared."""

from __future__ import annotations

from typing import Any

import torch

ALL = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


def assert_close(ours: Any, plain: Any, atol: float = 2e-3, rtol: float = 1e-3) -> None:
    """Assert that tensors, or tuples of them, are equal up to rounding and infinite alike."""
    if plain is None or isinstance(plain, torch.Tensor):
        assert type(ours) is type(plain)
        if plain is not None:
            assert ours.shape == plain.shape
            assert torch.allclose(ours, plain, atol=atol, rtol=rtol, equal_nan=True)
        return
    assert len(ours) == len(plain)
    for a, b in zip(ours, plain, strict=True):
        assert_close(a, b, atol, rtol)
