"""What a cache of the caller's holds after a call, compared with what plain leaves in another."""

from __future__ import annotations

from typing import Any

import torch


def assert_same_cache(ours: Any, plain: Any, mask: torch.Tensor | None = None) -> None:
    """The caches hold the same columns, up to rounding, where `mask` [rows, columns] is 1."""
    assert type(ours) is type(plain) and ours.get_seq_length() == plain.get_seq_length()
    for a, b in zip(ours.layers, plain.layers, strict=True):
        assert type(a) is type(b)
        for name in ("conv_states", "recurrent_states"):
            for x, y in zip(*(getattr(each, name, {}).values() for each in (a, b)), strict=True):
                assert x is y is None or torch.allclose(x, y, atol=5e-4, rtol=1e-3)
        if not hasattr(a, "keys"):
            continue
        assert a.get_seq_length() == b.get_seq_length()
        assert a.keys.shape == b.keys.shape
        held = 1 if mask is None else mask[:, -a.keys.shape[2] :][:, None, :, None]
        for x, y in ((a.keys, b.keys), (a.values, b.values)):
            assert torch.allclose(x * held, y * held, atol=5e-4, rtol=1e-3)
