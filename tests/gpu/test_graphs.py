"""Whole `generate` calls on a GPU: plain's text, with steps replayed as CUDA graphs and without.

The kernels on CUDA tensors are what tests/kernels runs where there is a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf.call.execution import REPLAYED, WAITS
from lookahead_hf.draft import DraftTree
from lookahead_hf.engines.cuda import graphs
from lookahead_hf.engines.cuda.capture import CudaRecorder
from lookahead_hf.rows import Rows
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.patched import patched
from lookahead_hf.runner.prefill import start
from tests.helpers.calls import padded
from tests.helpers.compared import compared
from tests.helpers.models import NAMES, prompt, tiny
from tests.helpers.replayed import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """No TF32, whose ten bits decide between the close logits of tiny models."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")


def on_gpu(name: str = "llama", **fields: Any) -> Any:
    return tiny(name, **fields).cuda()


SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 12, "top_p": 0.9}


@pytest.mark.parametrize("kind", ["none", "left", "holes"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "mixtral"])
def test_greedy(name: str, kind: str) -> None:
    stats = compare(on_gpu(name), padded(kind))
    assert stats.execution == REPLAYED
    assert stats.num_moved > 0


@pytest.mark.parametrize(("experts", "said"), [("eager", WAITS), ("batched_mm", REPLAYED)])
def test_experts_are_captured_if_they_do_not_wait(experts: str, said: str) -> None:
    model = on_gpu("mixtral")
    model.set_experts_implementation(experts)
    assert str(compare(model, padded("left")).execution).startswith(said)


def test_a_second_call_and_a_longer_text() -> None:
    model = on_gpu()
    for length in (10, 30, 600):
        inputs = {"input_ids": prompt(2, min(length, 400))}
        assert compare(model, inputs, max_new_tokens=80).execution == REPLAYED


def test_two_kinds_of_calls_take_turns() -> None:
    model = on_gpu()
    for _ in range(3):
        assert compare(model, padded("left")).execution == REPLAYED
        assert compare(model, padded("left"), **SAMPLED).execution == REPLAYED
    assert len(graphs.graphs_of(model).sets) == 2
    assert compare(model, padded("none", rows=1)).execution == REPLAYED


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_attention_of_the_kernel(monkeypatch: pytest.MonkeyPatch, cuda_graphs: bool) -> None:
    monkeypatch.setenv("LOOKAHEAD_HF_BACKEND", "triton")
    stats = compare(on_gpu("gemma3"), padded("left"), {"cuda_graphs": cuda_graphs})
    assert (stats.execution == REPLAYED) == cuda_graphs


def test_twins_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKAHEAD_HF_BACKEND", "torch")
    assert compare(on_gpu(), padded("left")).execution == REPLAYED


def test_verified_on_the_host() -> None:
    given = {name: tensor.cuda() for name, tensor in padded("left").items()}
    given |= {"max_new_tokens": 80, "no_repeat_ngram_size": 4, "pad_token_id": 0}
    columns = given["input_ids"].shape[1]
    stats = compared(on_gpu(), lambda: dict(given), columns).stats
    assert (stats.engine, stats.execution) == ("walk", REPLAYED)


def test_penalties_on_the_device() -> None:
    rules = {"repetition_penalty": 1.1, "min_new_tokens": 30}
    assert compare(on_gpu(), padded("left"), **rules).execution == REPLAYED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Logits of a block by the kernel's attention against those by torch's, graphs aside."""

    @torch.no_grad()
    def logits_of(tree: DraftTree, prompt: torch.Tensor) -> torch.Tensor:
        runner, rows = Runner(model, 2), Rows(prompt.cpu().numpy())
        with patched(model):
            start(runner, prompt)
            for row in range(2):
                rows.emit(row, 9)
            return runner.launch(rows, tree).logits

    model = tiny("llama", scale=1.0).to("cuda", dtype)
    tree = DraftTree.from_rows([([5, 6, 7, 8], [-1, 0, 0, 2])] * 2)
    both = []
    for backend in ("torch", "triton"):
        monkeypatch.setenv("LOOKAHEAD_HF_BACKEND", backend)
        both.append(logits_of(tree, prompt(2, 20).cuda()).float())
    torch.testing.assert_close(both[1], both[0], atol=3e-2, rtol=3e-2)


def test_a_failed_capture_leaves_the_stream_of_the_thread() -> None:
    before = torch.cuda.current_stream()
    recorder = CudaRecorder(torch.device("cuda", torch.cuda.current_device()))
    with pytest.raises(RuntimeError, match="captur"):
        recorder.record(lambda: (torch.ones((), device="cuda").item(),))
    assert torch.cuda.current_stream() == before
    assert torch.ones((), device="cuda").add(1).item() == 2
    assert torch.rand(3, device="cuda").sum().item() > 0
    assert compare(on_gpu(), padded("left"), **SAMPLED).execution == REPLAYED


def test_graphs_need_no_workspace_that_others_free() -> None:
    """torch's inductor frees the workspaces of cuBLAS around everything that it records."""
    model = on_gpu(hidden_size=1024, intermediate_size=4096)
    assert compare(model, padded("left")).execution == REPLAYED
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    filling = [torch.full((2**22,), float("nan"), device="cuda") for _ in range(16)]
    assert compare(model, padded("left")).execution == REPLAYED
    del filling


def test_captures_in_inference_mode_serve_outside_of_it() -> None:
    model = on_gpu()
    with torch.inference_mode():
        assert compare(model, padded("left"), **SAMPLED).execution == REPLAYED
    assert compare(model, padded("left"), **SAMPLED).execution == REPLAYED


def test_warming_up_as_it_is_called() -> None:
    model = lookahead_hf.enable(on_gpu(max_position_embeddings=1024))
    lookahead_hf.warm_up(model)
    (kept,) = graphs.graphs_of(model).sets
    assert {width for width, _, _ in kept.recordings} <= {*graphs.WIDTHS}


def test_every_step_is_one_launch() -> None:
    model = on_gpu()
    compare(model, padded("none"))  # captures
    with torch.profiler.profile() as profile:
        stats = compare(model, padded("none"))
    names = [event.name for event in profile.events()]
    assert sum("cudaGraphLaunch" in name for name in names) == stats.num_steps
