"""Steps that are captured and replayed, with a tape of CPU operations in place of CUDA graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LogitsProcessorList

import lookahead_hf
from lookahead_hf.block.block import is_read
from lookahead_hf.call.execution import REPLAYED, WAITS
from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting.session import DraftSession
from lookahead_hf.engines.cuda import graphs
from lookahead_hf.engines.cuda.runner import CudaRunner
from lookahead_hf.model import compat
from lookahead_hf.rows import Rows
from lookahead_hf.runner import attention
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.prefill import start
from tests.helpers.calls import GREEDY, padded
from tests.helpers.device import TapeRecorder, storages, taped
from tests.helpers.fakes import Recorder
from tests.helpers.models import NAMES, prompt, tiny
from tests.helpers.replayed import WIDTHS, compare, compare_calls, sets_of
from tests.helpers.trees import by_words
from tests.helpers.users_parts import Unknown

SAMPLE = ("llama", "gemma3", "mixtral")  # Architectures that are also tried where time is short


@pytest.mark.parametrize(
    "name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_replayed_steps_write_plains_text(name: str, made: list[TapeRecorder]) -> None:
    stats = compare(tiny(name), padded("holes"))
    assert stats.execution == "replayed"
    assert stats.num_moved > 0
    (recorder,) = made[-1:]
    widths = [recording.outputs[0].shape[1] for recording in recorder.recordings]
    assert {*widths} <= {*WIDTHS} and len({*widths}) == len(widths) > 1  # when asked for
    assert sum(r.num_replays for r in recorder.recordings) == stats.num_steps
    assert max(r.num_replays for r in recorder.recordings) > 5


@pytest.fixture
def attends(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """The kernel attends, or a stand-in that a tape can hold; counts its calls."""
    counts = Counter[bool]()

    def attend(block: Any, held: Any, *args: Any) -> torch.Tensor:
        counts[any(map(is_read, block.masks.values()))] += 1
        return by_words(block, held, *args)

    monkeypatch.setattr("lookahead_hf.block.layout.kernel_serves", lambda *_: True)
    monkeypatch.setattr("lookahead_hf.engines.cuda.step.kernel_serves", lambda *_: True)
    monkeypatch.setattr(attention, "kernel_serves", lambda *_: True)
    monkeypatch.setattr(attention, "kernel_is_faster", lambda *_: True)
    monkeypatch.setattr(attention, "attend_by_kernel", attend)
    return counts


@pytest.mark.parametrize(("name", "do_sample"), [("llama", False), ("gemma3", True)])
def test_where_the_kernel_attends_one_graph_serves_all_lengths(
    name: str, do_sample: bool, attends: Counter[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the widths of a GPU, and without masks."""
    monkeypatch.setattr(graphs, "LEAST_VISIBLE", 32)
    fields = {"layer_types": ["sliding_attention", "full_attention"]} if name == "gemma3" else {}
    model = tiny(name, num_hidden_layers=2, **fields)
    with taped(monkeypatch) as made:
        stats = compare(model, padded("left"), do_sample=do_sample)
        (recorder,) = made
        (kept,) = graphs.graphs_of(model).sets
        assert {*kept.recordings} <= {(width, 128, not do_sample) for width in graphs.WIDTHS}
        compare(model, padded("holes"), max_new_tokens=20, do_sample=do_sample)
    assert stats.execution == "replayed"
    assert 1 < len(recorder.recordings) == len(kept.recordings)
    assert attends[False] and not attends[True]


def test_sampled_steps_are_captured_up_to_the_logits(made: list[TapeRecorder]) -> None:
    stats = compare(tiny("llama"), padded("left"), do_sample=True, top_k=20)
    assert stats.execution == "replayed"
    assert all(r.outputs[1:] == (None,) for r in made[-1].recordings)  # no hidden states either


DECIDED_ON_THE_HOST: dict[str, tuple[str, str, Callable[[], dict[str, Any]]]] = {
    "prefix": ("walk", "alone", lambda: {"no_repeat_ngram_size": 4}),
    "prefixes": ("walk", "left", lambda: {"no_repeat_ngram_size": 4, "do_sample": True}),
    "scores": ("walk", "holes", lambda: {"return_dict_in_generate": True, "output_scores": True}),
    "own": ("lockstep", "left", lambda: {"logits_processor": LogitsProcessorList([Unknown()])}),
}


@pytest.mark.parametrize("name", DECIDED_ON_THE_HOST)
def test_forwards_are_captured_whatever_decides(name: str, made: list[TapeRecorder]) -> None:
    """The forward is what costs; the host keeps the tokens, also of a returned cache."""
    engine, kind, further = DECIDED_ON_THE_HOST[name]
    model, inputs = tiny("gemma3"), padded(kind, 1 if kind == "alone" else 3)
    for _ in range(2):
        stats = compare_calls(model, lambda: {**GREEDY, **inputs, **further()})
        assert (stats.engine, stats.execution) == (engine, "replayed")
        assert stats.num_moved > 0
    assert len(sets_of(made)) == 1
    if not further().get("do_sample"):  # what is captured serves both engines
        compare(model, inputs, do_sample=True)
        assert len(sets_of(made)) == 1


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
    monkeypatch.setattr(graphs, "LEAST_VISIBLE", 16)
    stats = compare(model := tiny("mistral"), padded("left"), max_new_tokens=70)
    assert stats.execution == "replayed"
    (kept,) = graphs.graphs_of(model).sets
    assert {visible for _, visible, _ in kept.recordings} == {32, 64, 128}


def test_steps_that_capture_tell_nothing_about_costs(
    made: list[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "LEAST_VISIBLE", 16)
    captured, counted = [0], []
    observe = DraftSession.observe

    def observed(drafts: Any, *args: Any) -> None:
        *_, seconds = args
        captured.append(sum(len(each.recordings) for each in made))
        counted.append((captured[-1] > captured[-2], seconds is not None))
        observe(drafts, *args)

    monkeypatch.setattr(DraftSession, "observe", observed)
    compare(tiny("mistral"), padded("left"), max_new_tokens=70)
    assert {*counted} == {(True, False), (False, True)}
    assert counted.count((True, False)) > 1  # in mid-text, too


@pytest.mark.parametrize(("experts", "said"), [("eager", WAITS), ("batched_mm", REPLAYED)])
def test_experts_are_captured_if_they_do_not_wait(
    experts: str, said: str, made: list[TapeRecorder]
) -> None:
    model = tiny("mixtral")
    model.set_experts_implementation(experts)
    assert str(compare(model, padded("left")).execution).startswith(said)


class MostBytes(TorchDispatchMode):
    """Notes the largest tensor that an operation makes, in a forward of so many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and storages(tensor) - storages((args, kwargs)):
                self.bytes = max(self.bytes, tensor.nbytes)
        return out


@pytest.mark.parametrize("kind", [Runner, CudaRunner])
@pytest.mark.parametrize(
    ("gpu", "rows", "width", "gathers"),
    [
        *((major, 1, 1, True) for major in (8, 9)),
        *((major, 9, 1, False) for major in (8, 9)),
        *((major, 1, 8, False) for major in (8, 9)),
        (8, 1, 4, False),
    ],
)
def test_blocks_copy_no_experts(
    gpu: int,
    rows: int,
    width: int,
    gathers: bool,
    kind: type[Runner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU; one token gathers the weights of its experts."""
    model = tiny("mixtral", num_local_experts=8, intermediate_size=256)
    model = model.to(torch.bfloat16)
    runner, texts = kind(model, rows), Rows(np.full((rows, 20), 5))
    start(runner, prompt(rows, 20))
    monkeypatch.setattr(type(model), "device", property(lambda _: torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (gpu, 0))
    for row in range(rows):
        texts.emit(row, 5)
    draft = DraftTree.from_chains([[list(range(5, 4 + width))]] * rows)
    with torch.no_grad(), compat.set_up_for_decoding(model), MostBytes() as most:
        runner.launch(texts, draft)
    assert model.get_experts_implementation() == {"": "grouped_mm"}
    of_expert = model.model.layers[0].mlp.experts.gate_up_proj[0].nbytes
    assert (most.bytes >= of_expert) == gathers


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
    fields = {"draft_invariant": True, "compiled_layers": False}
    stats = compare(model, padded("left"), fields)
    assert stats.execution == "replayed"
    assert stats.num_moved == 0
    (recorder,) = sets_of(made)
    assert [r.outputs[0].shape[1] for r in recorder.recordings] == [16]
    compare(model, padded("left", length=20), fields)
    assert len(recorder.recordings) == 1
