"""What a cache of the caller's holds after a call, compared with what plain leaves in another."""

from __future__ import annotations

from typing import Any

import torch
from transformers import StaticCache

from lookahead_hf.model import compat

CACHE = compat.GENERATE_CACHE
"""The name of the cache among the arguments of `generate` and the fields of its output."""


def assert_same_cache(
    ours: Any, plain: Any, mask: torch.Tensor | None = None, atol: float = 5e-4, rtol: float = 1e-3
) -> None:
    """The caches hold the same columns, up to rounding, where `mask` [rows, columns] is 1."""
    assert type(ours) is type(plain) and int(ours.get_seq_length()) == int(plain.get_seq_length())
    for a, b in zip(ours.layers, plain.layers, strict=True):
        assert type(a) is type(b)
        for name in ("conv_states", "recurrent_states"):
            for x, y in zip(*(getattr(each, name, {}).values() for each in (a, b)), strict=True):
                assert x is y is None or torch.allclose(x, y, atol=atol, rtol=rtol)
        if not hasattr(a, "keys") or not hasattr(a, "get_seq_length"):
            continue
        assert int(a.get_seq_length()) == int(b.get_seq_length())
        assert a.keys.shape == b.keys.shape
        rows, _, columns, _ = a.keys.shape
        held = torch.ones(rows, columns)
        if mask is not None:  # of the last columns, or of all before the room that is left
            room = max(0, columns - mask.shape[1])
            held = torch.nn.functional.pad(mask[:, -columns:].float(), (0, room))
        if isinstance(plain, StaticCache) and b.is_sliding:
            held[:, 0] = 0  # a column that is never read again once it is the oldest
        held = held[:, None, :, None].to(a.keys.device)
        for x, y in ((a.keys, b.keys), (a.values, b.values)):
            seen = (each.masked_fill(held == 0, 0.0) for each in (x, y))
            torch.testing.assert_close(*seen, atol=atol, rtol=rtol)
