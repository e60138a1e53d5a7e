"""Steps that are captured and replayed, with a tape of CPU operations in place of CUDA graphs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.runner.cuda import graph_set
from lookahead_hf.runner.execution import REPLAYED, WAITS
from tests.helpers.calls import GREEDY, padded
from tests.helpers.device import TapeRecorder
from tests.helpers.fakes import Recorder
from tests.helpers.models import NAMES, prompt, tiny
from tests.helpers.packing import in_threads
from tests.helpers.replayed import WIDTHS, compare, sets_of

SAMPLE = ("llama", "gemma3", "mixtral")
"""Architectures that are also tried where time is short."""


@pytest.mark.parametrize("kind", ["left", "holes"])
@pytest.mark.parametrize(
    "name",
    [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.slow) for n in NAMES],
)
def test_replayed_steps_write_plains_text(name: str, kind: str, made: list[TapeRecorder]) -> None:
    stats = compare(tiny(name), padded(kind))
    assert stats.execution == "replayed"
    assert stats.num_moved > 0
    (recorder,) = made[-1:]
    assert [r.outputs[0].shape[1] for r in recorder.recordings] == list(WIDTHS)  # largest first
    assert sum(r.num_replays for r in recorder.recordings) == stats.num_steps
    assert max(r.num_replays for r in recorder.recordings) > 5


def test_sampled_steps_are_captured_up_to_the_logits(made: list[TapeRecorder]) -> None:
    stats = compare(tiny("llama"), padded("left"), do_sample=True, top_k=20)
    assert stats.execution == "replayed"
    assert all(r.outputs[1:] == (None,) for r in made[-1].recordings)  # no hidden states either


def test_graphs_outlive_inference_mode(made: list[TapeRecorder]) -> None:
    model = tiny("llama")
    with torch.inference_mode():
        compare(model, padded("left"))
    assert compare(model, padded("left")).execution == "replayed"
    with torch.inference_mode():
        assert compare(model, padded("holes"), do_sample=True).execution == "replayed"
    assert compare(model, padded("holes"), do_sample=True).execution == "replayed"


def test_longer_texts_show_more_slots(
    made: list[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_set, "LEAST_VISIBLE", 16)
    stats = compare(tiny("mistral"), padded("left"), max_new_tokens=70)
    assert stats.execution == "replayed"
    (recorder,) = sets_of(made)
    assert len(recorder.recordings) > len(WIDTHS)


@pytest.mark.parametrize(("experts", "said"), [("eager", WAITS), ("batched_mm", REPLAYED)])
def test_experts_are_captured_if_they_do_not_wait(
    experts: str, said: str, made: list[TapeRecorder]
) -> None:
    model = tiny("mixtral")
    model.set_experts_implementation(experts)
    assert str(compare(model, padded("left")).execution).startswith(said)


def test_threads_share_a_model(made: list[TapeRecorder]) -> None:
    model = tiny("llama")
    inputs = [padded(kind) for kind in ("left", "none", "holes")]
    plain = [model.generate(**each, **GREEDY).tolist() for each in inputs]
    config = SpeculativeConfig(budget=8, cuda_graphs=True)
    ours: dict[int, Any] = {}

    def run(index: int) -> None:
        ours[index] = model.generate(**inputs[index], **GREEDY, speculative=config).tolist()

    with lookahead_hf.enabled(model):
        in_threads(*(partial(run, index) for index in range(3)))
    assert [ours[index] for index in range(3)] == plain


def test_an_error_gives_the_graphs_back(made: list[TapeRecorder]) -> None:
    model = tiny("llama")
    compare(model, padded("left"))
    with lookahead_hf.enabled(model), pytest.raises(ConnectionError):
        model.generate(prompt(), **GREEDY, streamer=Recorder(1), speculative=True)
    assert compare(model, padded("left")).execution == "replayed"


@pytest.mark.parametrize(
    ("asked", "new_tokens", "said"),
    [
        (False, 40, "not asked for"),
        ("auto", 40, "the call is too short to capture for"),
        ("auto", 64, "replayed"),
    ],
)
def test_when_graphs_are_used(
    asked: Any, new_tokens: int, said: str, made: list[TapeRecorder]
) -> None:
    model = tiny("llama")
    stats = compare(model, padded("none"), {"cuda_graphs": asked}, max_new_tokens=new_tokens)
    assert stats.execution == said
    assert stats.to_dict()["execution"] == said


def test_one_block_shape_is_one_graph(made: list[TapeRecorder]) -> None:
    model = tiny("llama")
    stats = compare(model, padded("left"), {"draft_invariant": True})
    assert stats.execution == "replayed"
    assert stats.max_width == 1
    (recorder,) = sets_of(made)
    assert [r.outputs[0].shape[1] for r in recorder.recordings] == [16]
    compare(model, padded("left", length=20), {"draft_invariant": True})
    assert len(recorder.recordings) == 1
