"""Whole `generate` calls on a GPU: plain's text, with steps replayed as CUDA graphs and without.

The kernels on CUDA tensors are what tests/kernels runs where there is a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting import Drafter
from tests.helpers import models
from tests.helpers.blocks import logits_of_a_tree
from tests.helpers.compared import compared
from tests.helpers.scripted import RandomTrees, Scripted, continuations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

NEW = 80
"""Enough for "auto" to capture."""


@pytest.fixture(autouse=True)
def exact_products() -> Any:
    """No TF32, whose ten bits decide between the close logits of tiny models."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def inputs(rows: int) -> dict[str, Any]:
    """Prompts of different lengths, padded on the left."""
    mask = torch.ones(rows, 20, dtype=torch.long)
    for row in range(1, rows):
        mask[row, : 6 * row] = 0
    ids = models.prompt(rows, 20).masked_fill(mask == 0, 0)
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda(), "pad_token_id": 0}


def run(model: Any, rows: int, cuda_graphs: str | bool = "auto", **settings: Any) -> Any:
    given = {**inputs(rows), "max_new_tokens": NEW, **settings}
    torch.manual_seed(7)
    plain = model.generate(**given)
    after = torch.cuda.get_rng_state()
    drafter: Drafter = Scripted(continuations(plain.cpu(), 20), RandomTrees())
    config = SpeculativeConfig(drafters=(drafter,), budget=64, cuda_graphs=cuda_graphs)
    torch.manual_seed(7)
    with lookahead_hf.enabled(model):
        ours = model.generate(**given, speculative=config)
    stats = lookahead_hf.last_stats(model)
    assert ours.tolist() == plain.tolist()
    assert torch.equal(torch.cuda.get_rng_state(), after)
    assert stats is not None
    assert stats.fallback_reason is None
    assert stats.engine == "device"
    assert stats.num_accepted > 0
    assert stats.num_moved > 0
    return stats


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "gpt2", "mistral"])
def test_greedy_in_graphs(name: str, rows: int) -> None:
    assert run(models.tiny(name).cuda(), rows).execution == "replayed"


@pytest.mark.parametrize("rows", [1, 3])
def test_sampled_in_graphs(rows: int) -> None:
    settings = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
    assert run(models.tiny("llama").cuda(), rows, **settings).execution == "replayed"


def test_a_second_call_replays_the_first_ones_graphs() -> None:
    model = models.tiny("llama").cuda()
    assert [run(model, 2).execution for _ in range(2)] == ["replayed"] * 2


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_attention_of_the_kernel(monkeypatch: pytest.MonkeyPatch, cuda_graphs: bool) -> None:
    monkeypatch.setenv("LOOKAHEAD_HF_BACKEND", "triton")
    stats = run(models.tiny("gemma3").cuda(), 3, cuda_graphs)
    assert (stats.execution == "replayed") == cuda_graphs


def test_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Triton the walk and the compaction are tensor operations, in the graph too."""
    monkeypatch.setenv("LOOKAHEAD_HF_BACKEND", "torch")
    assert run(models.tiny("llama").cuda(), 2).execution == "replayed"


def test_verified_on_the_host() -> None:
    model = models.tiny("llama").cuda()
    given = {**inputs(2), "max_new_tokens": 20, "repetition_penalty": 1.1}
    assert compared(model, lambda: dict(given), 20).stats.engine == "walk"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Logits of a block by the kernel's attention against those by torch's, graphs aside."""
    model = models.tiny("llama", scale=1.0).to("cuda", dtype)
    tree = DraftTree.from_rows([([5, 6, 7, 8], [-1, 0, 0, 2])] * 2)
    both = []
    for backend in ("torch", "triton"):
        monkeypatch.setenv("LOOKAHEAD_HF_BACKEND", backend)
        both.append(logits_of_a_tree(model, models.prompt(2, 20).cuda(), tree).float())
    torch.testing.assert_close(both[1], both[0], atol=3e-2, rtol=3e-2)
