"""Real CUDA graphs: the same text from captured steps, on a machine that has a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf.runner.cuda import graphs
from lookahead_hf.runner.cuda.capture import CudaRecorder
from tests.helpers.calls import GREEDY, padded
from tests.helpers.models import NAMES, prompt, tiny
from tests.helpers.scripted import RandomTrees, continuations, scripted

pytestmark = pytest.mark.gpu


def compare(model: Any, inputs: dict[str, torch.Tensor], **call: Any) -> str | None:
    """Assert that captured steps give plain's text; return what is said of the graphs."""
    inputs = {name: tensor.cuda() for name, tensor in inputs.items()}
    call = {**GREEDY, **call}
    torch.manual_seed(7)
    plain = model.generate(**inputs, **call)
    after = torch.cuda.get_rng_state()
    truth = continuations(plain, inputs["input_ids"].shape[1])
    config = replace(scripted(truth, RandomTrees()), cuda_graphs=True)
    torch.manual_seed(7)
    lookahead_hf.enable(model)  # graphs are freed where `enabled` ends
    ours = model.generate(**inputs, **call, speculative=config)
    assert ours.tolist() == plain.tolist()
    assert torch.equal(torch.cuda.get_rng_state(), after)
    stats = lookahead_hf.last_stats(model)
    assert stats is not None
    assert stats.engine == "device"
    assert stats.num_accepted > 0
    return stats.execution


@pytest.mark.parametrize("kind", ["none", "left", "holes"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "mixtral"])
def test_greedy(name: str, kind: str) -> None:
    assert compare(tiny(name).cuda(), padded(kind)) == "replayed"


def test_sampled() -> None:
    sampled = {"do_sample": True, "temperature": 0.8, "top_k": 12, "top_p": 0.9}
    assert compare(tiny("llama").cuda(), padded("left"), **sampled) == "replayed"


def test_experts_in_float32_wait_and_are_not_captured() -> None:
    said = compare(tiny("mixtral").cuda(), padded("left"))
    assert said == "replayed" or (said or "").startswith("a forward waits for the device")


def test_a_second_call_and_a_longer_text() -> None:
    model = tiny("llama").cuda()
    for length in (10, 30, 600):
        inputs = {"input_ids": prompt(2, min(length, 400))}
        assert compare(model, inputs, max_new_tokens=80) == "replayed"
    graphs.release(model)
    assert compare(model, padded("left")) == "replayed"


def test_two_kinds_of_calls_take_turns() -> None:
    model = tiny("llama").cuda()
    for _ in range(3):
        assert compare(model, padded("left")) == "replayed"
        assert compare(model, padded("left"), do_sample=True, top_k=12) == "replayed"
    assert len(graphs._kept[model].sets) == 2
    assert compare(model, padded("none", rows=1)) == "replayed"
    assert compare(model, padded("left"), do_sample=True, top_k=12) == "replayed"


def test_hooks_are_called() -> None:
    model, factor = tiny("llama").cuda(), [1.0]
    assert compare(model, padded("left")) == "replayed"
    model.model.layers[1].mlp.register_forward_hook(lambda _, args, output: output * factor[0])
    for factor[0] in (0.5, 2.0):
        assert compare(model, padded("left")) == "modules have hooks"


def test_a_capture_that_fails_leaves_the_threads_stream() -> None:
    before = torch.cuda.current_stream()
    recorder = CudaRecorder(torch.device("cuda", torch.cuda.current_device()))
    with pytest.raises(RuntimeError, match="captur"):
        recorder.record(lambda: (torch.ones((), device="cuda").item(),))
    assert torch.cuda.current_stream() == before
    assert torch.ones((), device="cuda").add(1).item() == 2


def test_nothing_waits_for_the_device_but_the_copy() -> None:
    model = tiny("llama").cuda()
    inputs = {"input_ids": prompt().cuda()}
    truth = continuations(model.generate(**inputs, **GREEDY), 12)
    config = replace(scripted(truth, RandomTrees()), cuda_graphs=True)
    with lookahead_hf.enabled(model):
        model.generate(**inputs, **GREEDY, speculative=config)  # captures
        with torch.profiler.profile() as profile:
            model.generate(**inputs, **GREEDY, speculative=config)
    stats = lookahead_hf.last_stats(model)
    assert stats is not None
    names = [event.name for event in profile.events()]
    assert sum("cudaGraphLaunch" in name for name in names) == stats.num_steps
