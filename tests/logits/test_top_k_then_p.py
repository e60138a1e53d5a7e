"""Top-k and top-p in one keep what the two keep, also where scores are tied."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import logits_process as hf

from lookahead_hf.draft import DraftTree
from lookahead_hf.logits.warpers import TopKThenP, joined
from lookahead_hf.rows import Rows
from lookahead_hf.verification.node_processors import NodeProcessors

VOCAB = 5000


def scores_of(kind: str) -> torch.Tensor:
    """Scores of 64 nodes."""
    scores = 3 * torch.randn(64, VOCAB)
    if kind == "tied":
        return scores.mul(2).round().div(2)  # about 30 values
    if kind == "few":
        return scores.masked_fill(torch.rand_like(scores) > 0.002, -torch.inf)
    if kind == "nan":
        scores[::3, 7], scores[1::3, 9] = torch.nan, torch.inf
    return scores.to(torch.bfloat16).float() if kind == "bfloat16" else scores


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "tied", "few", "nan"])
@pytest.mark.parametrize("top_k", [1, 50, 300, VOCAB + 1])
@pytest.mark.parametrize(("top_p", "least"), [(0.0, 1), (0.3, 1), (0.9, 5), (0.9, 60), (0.999, 1)])
def test_what_is_kept(
    kind: str, top_k: int, top_p: float, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = scores_of(kind)
    k = hf.TopKLogitsWarper(top_k, min_tokens_to_keep=least)
    p = hf.TopPLogitsWarper(top_p, min_tokens_to_keep=least)
    # Every sort of CUDA is stable; that of a CPU need not be.
    monkeypatch.setattr(torch, "sort", partial(torch.sort, stable=True))
    expected = p(None, k(None, scores))
    found = TopKThenP(k, p)(scores[:, :0].long(), scores)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)


class Sorts(TorchDispatchMode):
    """Notes how many entries are sorted in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.sort, torch.ops.aten.argsort):
            self.sizes.append(args[0].shape[-1])
        return func(*args, **(kwargs or {}))


def test_the_vocabulary_is_not_sorted() -> None:
    processors: list[Any] = [
        hf.TemperatureLogitsWarper(0.7),
        hf.TopKLogitsWarper(50),
        hf.TopPLogitsWarper(0.9),
        hf.TopPLogitsWarper(0.8),
    ]
    kinds = [type(each) for each in joined(processors)]
    assert kinds == [hf.TemperatureLogitsWarper, TopKThenP, hf.TopPLogitsWarper]
    rows, scores = Rows(np.zeros((1, 4), np.int64)), scores_of("float32")[None]
    rows.emit(0, 5)
    draft = DraftTree.from_chains([[list(range(63))]])
    with Sorts() as sorts:
        NodeProcessors(processors[:3])(rows, draft, scores)
    assert sorts.sizes == [50, 50]
    assert joined([hf.TopKLogitsWarper(5, filter_value=-9.0), processors[2]])[1:] == [processors[2]]
