"""When attention is left to the kernel, and what it is told."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lookahead_hf.draft import DraftTree
from lookahead_hf.kernels import dispatch
from lookahead_hf.runner import attention, masks, tree_attention
from tests.helpers import models


def test_words_hold_who_sees_whom() -> None:
    parents = [-1, 0, 0, 1, *range(3, 62)]
    draft = DraftTree.from_rows([([1] * 63, parents)])
    seen = np.stack([masks.ancestors(draft, 0, 64)])
    words = tree_attention.ancestor_words(seen)
    assert words.dtype == np.int64
    assert words[0, 63] < 0  # the 64th token's own bit is the sign
    assert ((words[:, :, None] >> np.arange(64) & 1) == seen).all()


def layer(rows: int, heads: int, kv_heads: int, width: int, slots: int, dim: int) -> tuple:
    made = (rows, heads, width, dim), (rows, kv_heads, slots, dim), (rows, kv_heads, slots, dim)
    return tuple(torch.empty(shape, device="meta") for shape in made)


def test_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long contexts whose programs would leave processors of the GPU idle."""
    monkeypatch.delenv("LOOKAHEAD_HF_BACKEND", raising=False)
    monkeypatch.setattr(tree_attention, "_processors", lambda _: 132)
    assert tree_attention.is_faster(*layer(1, 28, 4, 64, 2048, 128))
    assert not tree_attention.is_faster(*layer(1, 28, 4, 64, 256, 128))
    assert not tree_attention.is_faster(*layer(8, 28, 4, 64, 2048, 128))
    assert not tree_attention.is_faster(*layer(1, 4, 1, 8, 2048, 512))
    monkeypatch.setenv("LOOKAHEAD_HF_BACKEND", "triton")
    assert tree_attention.is_faster(*layer(8, 28, 4, 64, 256, 128))


def test_not_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOOKAHEAD_HF_BACKEND", raising=False)
    monkeypatch.setattr(dispatch, "_has_triton", lambda device: True)
    assert not tree_attention.serves(torch.device("cpu"), 8)
    assert tree_attention.serves(torch.device("cuda"), 64)
    assert not tree_attention.serves(torch.device("cuda"), 65)


def test_a_name_is_given_back_after_the_call() -> None:
    model = models.tiny("llama")
    with attention.laid_under(model):
        with attention.laid_under(model):
            assert model.config._attn_implementation == "lookahead:sdpa"
        assert model.config._attn_implementation == "lookahead:sdpa"
    assert model.config._attn_implementation == "sdpa"
