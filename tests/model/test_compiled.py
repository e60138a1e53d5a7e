"""Models whose forward was given to `torch.compile`: plain's text, from few compiled shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import CompileConfig

import lookahead_hf
from lookahead_hf.call.execution import OWN_GRAPHS
from lookahead_hf.model import facts
from lookahead_hf.model.compiled import WIDTHS, is_compiled
from lookahead_hf.patches.trust import ModelSnapshot
from tests.helpers.calls import GREEDY, padded
from tests.helpers.compared import compared
from tests.helpers.device import on_device, taped
from tests.helpers.models import tiny
from tests.helpers.scripted import RandomTrees


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forget what other tests compiled, so that it counts towards no limit."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def small(name: str = "llama") -> Any:
    return tiny(name, num_hidden_layers=1)


def compare(model: Any, seed: int = 0, **call: Any) -> lookahead_hf.SpeculativeStats:
    """Assert that speculation gives plain's text; return what it did."""
    call = {**padded("left"), **GREEDY, **call}
    columns = call["input_ids"].shape[1]
    return compared(model, lambda: dict(call), columns, RandomTrees(seed), cuda_graphs=True).stats


def on(engine: str, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[Any]:
    return on_device(monkeypatch) if engine == "device" else nullcontext()


@pytest.mark.parametrize("engine", [pytest.param("walk", marks=pytest.mark.slow), "device"])
def test_few_shapes_are_compiled(engine: str, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, counter = small(), CompileCounter()
    if engine == "walk":
        model.forward = torch.compile(model.forward, backend=counter)
    else:
        model.compile(backend=counter, fullgraph=True)
    assert is_compiled(model)
    with on(engine, monkeypatch):
        assert compare(model).engine == engine
        of_both = counter.frame_count
        assert 0 < of_both <= 3 + len(WIDTHS)  # plain's prompt, first step and every later step
        compare(model, seed=1, max_new_tokens=30)
        compare(model, seed=2)
    assert counter.frame_count == of_both


def test_compiled_layers_are_captured(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    assert is_compiled(model)
    with taped(monkeypatch) as made:
        stats = compare(model, max_new_tokens=24)
    assert stats.execution == "replayed"
    assert {r.outputs[0].shape[1] for r in made[-1].recordings} <= {*WIDTHS}


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({"mode": "reduce-overhead"}, True),
        ({"options": {"triton.cudagraphs": True}}, True),
        ({}, False),
        ({"backend": "eager"}, False),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's, when it is imported
def test_a_compiler_that_captures_graphs_is_left_to_it(options: dict[str, Any], own: bool) -> None:
    model = small()
    assert not is_compiled(model)
    model.model.forward = torch.compile(model.model.forward, **options)
    facts.read(model)
    assert is_compiled(model)
    assert ModelSnapshot(model).blockers({}) == ([OWN_GRAPHS] if own else [])


def test_a_wrapped_model_generates_as_it_is(fresh: None) -> None:
    model, counter = small(), CompileCounter()
    wrapped = torch.compile(model, backend=counter)
    compare(wrapped)
    assert counter.frame_count == 0  # transformers' own: `generate` is the inner model's


def test_what_transformers_compiles_by_itself(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CompileConfig(backend="eager")
    config._compile_all_devices = True
    call = {"cache_implementation": "static", "compile_config": config}
    model = small()
    with taped(monkeypatch):
        assert compare(model, **call).execution == "replayed"
    assert hasattr(model, "_compiled_call")
