"""Steps that are captured and replayed, with a tape of CPU operations in place of CUDA graphs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.target import graphs
from tests.device import TapeRecorder, taped
from tests.models import NAMES, prompt, tiny
from tests.scripted import RandomTrees, continuations, scripted
from tests.test_lossless import GREEDY, padded

WIDTHS = (16, 4, 1)
SAMPLE = ("llama", "gemma3", "mixtral")
"""Architectures that are also tried where time is short."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TapeRecorder]]:
    monkeypatch.setattr(graphs, "WIDTHS", WIDTHS)
    with taped(monkeypatch) as recorders:
        yield recorders


def compare(
    model: Any, inputs: dict[str, torch.Tensor], fields: dict[str, Any] | None = None, **call: Any
) -> lookahead_hf.SpeculativeStats:
    """Assert that speculation gives plain's text; return what it did."""
    call = {**GREEDY, **call}
    torch.manual_seed(7)
    plain = model.generate(**inputs, **call)
    truth = continuations(plain, inputs["input_ids"].shape[1])
    config = replace(scripted(truth, RandomTrees()), **{"cuda_graphs": True, **(fields or {})})
    torch.manual_seed(7)
    lookahead_hf.enable(model)  # graphs are freed where `enabled` ends
    ours = model.generate(**inputs, **call, speculative=config)
    assert ours.tolist() == plain.tolist()
    stats = lookahead_hf.last_stats(model)
    assert stats is not None
    assert stats.fallback_reason is None
    assert stats.engine == "device"
    assert stats.num_accepted > 0
    return stats


@pytest.mark.parametrize("kind", ["left", "holes"])
@pytest.mark.parametrize(
    "name",
    [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.slow) for n in NAMES],
)
def test_replayed_steps_write_plains_text(name: str, kind: str, made: list[TapeRecorder]) -> None:
    stats = compare(tiny(name), padded(kind))
    assert stats.graphs == "replayed"
    assert stats.num_moved > 0
    (recorder,) = made[-1:]
    assert [r.outputs[0].shape[1] for r in recorder.recordings] == list(WIDTHS)  # largest first
    assert sum(r.num_replays for r in recorder.recordings) == stats.num_steps
    assert max(r.num_replays for r in recorder.recordings) > 5


def test_sampled_steps_are_captured_up_to_the_logits(made: list[TapeRecorder]) -> None:
    stats = compare(tiny("llama"), padded("left"), do_sample=True, top_k=20)
    assert stats.graphs == "replayed"
    assert all(len(r.outputs) == 1 for r in made[-1].recordings)


def sets_of(made: list[TapeRecorder]) -> list[TapeRecorder]:
    return [recorder for recorder in made if recorder.recordings]


def test_later_calls_move_into_the_same_graphs(made: list[TapeRecorder]) -> None:
    model = tiny("gemma3")
    compare(model, padded("left"))
    compare(model, padded("holes", length=30))
    assert len(sets_of(made)) == 1
    assert len(sets_of(made)[0].recordings) == len(WIDTHS)
    compare(model, padded("none", rows=2))
    first, second = sets_of(made)
    assert first.released == len(WIDTHS)  # all together
    assert second.released == 0
    lookahead_hf.disable(lookahead_hf.enable(model))
    assert second.released == len(WIDTHS)


def test_a_short_call_of_another_shape_leaves_the_graphs(made: list[TapeRecorder]) -> None:
    model = tiny("llama")
    compare(model, padded("left"))
    stats = compare(model, padded("none", rows=2), {"cuda_graphs": "auto"}, max_new_tokens=20)
    assert stats.graphs == "the call is too short to capture for"
    assert compare(model, padded("left")).graphs == "replayed"
    (recorder,) = sets_of(made)
    assert recorder.released == 0
    assert recorder.calls == ["begin", "end"] * 2  # each waits for the one before


def test_graphs_outlive_inference_mode(made: list[TapeRecorder]) -> None:
    model = tiny("llama")
    with torch.inference_mode():
        compare(model, padded("left"))
    assert compare(model, padded("left")).graphs == "replayed"
    with torch.inference_mode():
        assert compare(model, padded("holes"), do_sample=True).graphs == "replayed"
    assert compare(model, padded("holes"), do_sample=True).graphs == "replayed"


class Wrapped(torch.Tensor):
    """A tensor with its numbers in another one, as quantised weights are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_weights_in_wrappers_are_told_apart() -> None:
    weights = torch.randn(2, 3), torch.randn(2, 3)
    assert graphs._addresses(Wrapped(weights[0])) == graphs._addresses(weights[0])
    assert graphs._addresses(Wrapped(weights[0])) != graphs._addresses(weights[1])


def test_what_a_graph_has_frozen_makes_a_new_one(made: list[TapeRecorder]) -> None:
    model = tiny("llama")
    compare(model, padded("none"))
    seen = []
    handle = model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    compare(model, padded("none"))
    handle.remove()
    assert len(sets_of(made)) == 2
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight)
    compare(model, padded("none"))
    assert len(sets_of(made)) == 3


def test_longer_texts_show_more_slots(
    made: list[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "LEAST_VISIBLE", 16)
    stats = compare(tiny("mistral"), padded("left"), max_new_tokens=70)
    assert stats.graphs == "replayed"
    (recorder,) = sets_of(made)
    assert len(recorder.recordings) > len(WIDTHS)


def test_a_forward_that_waits_is_not_captured(made: list[TapeRecorder]) -> None:
    model = tiny("llama")
    model.model.norm.register_forward_hook(lambda *args: args[2].sum().item() and None)
    for _ in range(2):  # the second call knows already
        stats = compare(model, padded("left"))
        assert stats.graphs is not None
        assert stats.graphs.startswith("a forward waits for the device")
    assert sets_of(made) == []


def test_further_tensors_are_not_captured(made: list[TapeRecorder]) -> None:
    model = tiny("llama")
    assert graphs.refusal(model, model.device, {}) is None
    assert graphs.refusal(model, model.device, {"token_type_ids": prompt()}) is not None


def test_a_static_cache_is_served(made: list[TapeRecorder]) -> None:
    stats = compare(tiny("llama"), padded("left"), cache_implementation="static")
    assert stats.graphs == "replayed"


def test_a_capture_that_fails_leaves_the_text_alone(
    made: list[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no memory\nfor graphs")

    monkeypatch.setattr(TapeRecorder, "record", fails)
    assert compare(tiny("llama"), padded("left")).graphs == "RuntimeError: no memory"


def test_one_call_at_a_time(made: list[TapeRecorder]) -> None:
    model = tiny("llama")
    compare(model, padded("left"))
    (held,) = [found for found in graphs._sets.values() if found.recorder is sets_of(made)[0]]
    with held.in_use:
        stats = compare(model, padded("left"))
    assert stats.graphs == "another call is using the model's graphs"
    assert compare(model, padded("left")).graphs == "replayed"


def test_threads_share_a_model(made: list[TapeRecorder]) -> None:
    model = tiny("llama")
    inputs = [padded(kind) for kind in ("left", "none", "holes")]
    plain = [model.generate(**each, **GREEDY).tolist() for each in inputs]
    config = SpeculativeConfig(budget=8, cuda_graphs=True)
    ours: dict[int, Any] = {}

    def run(index: int) -> None:
        ours[index] = model.generate(**inputs[index], **GREEDY, speculative=config).tolist()

    with lookahead_hf.enabled(model):
        threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [ours[index] for index in range(3)] == plain


def test_an_error_gives_the_graphs_back(made: list[TapeRecorder]) -> None:
    model = tiny("llama")
    compare(model, padded("left"))

    class Broken:
        def put(self, value: torch.Tensor) -> None:
            if value.dim() == 1:
                raise OSError("gone")

        def end(self) -> None:
            pass

    with lookahead_hf.enabled(model), pytest.raises(OSError, match="gone"):
        model.generate(prompt(), **GREEDY, streamer=Broken(), speculative=True)
    assert compare(model, padded("left")).graphs == "replayed"


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
    assert stats.graphs == said
    assert stats.to_dict()["graphs"] == said


def test_one_block_shape_is_one_graph(made: list[TapeRecorder]) -> None:
    model = tiny("llama")
    stats = compare(model, padded("left"), {"draft_invariant": True})
    assert stats.graphs == "replayed"
    assert stats.max_width == 1
    (recorder,) = sets_of(made)
    assert [r.outputs[0].shape[1] for r in recorder.recordings] == [16]
    compare(model, padded("left", length=20), {"draft_invariant": True})
    assert len(recorder.recordings) == 1


def test_a_dead_model_takes_its_graphs_along(made: list[TapeRecorder]) -> None:
    gc.collect()
    before = len(graphs._sets)
    model = tiny("llama")
    compare(model, padded("none"))
    assert len(graphs._sets) == before + 1
    del model
    gc.collect()
    assert len(graphs._sets) == before
