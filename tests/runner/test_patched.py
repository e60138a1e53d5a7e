"""Models that were given to `torch.compile`: calls run their code uncompiled, and put it back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import lookahead_hf
from lookahead_hf.runner.patched import patched
from tests.helpers.calls import GREEDY, padded
from tests.helpers.compared import compared
from tests.helpers.device import on_device
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


def compare(model: Any, **call: Any) -> lookahead_hf.SpeculativeStats:
    """Assert that speculation gives plain's text; return what it did."""
    call = {**padded("left"), **GREEDY, **call}
    columns = call["input_ids"].shape[1]
    return compared(model, lambda: dict(call), columns, RandomTrees(0), cuda_graphs=True).stats


def on(engine: str, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[Any]:
    return on_device(monkeypatch) if engine == "device" else nullcontext()


def whole(model: Any, counter: CompileCounter) -> None:
    model.compile(backend=counter, fullgraph=True)


def forward(model: Any, counter: CompileCounter) -> None:
    model.forward = torch.compile(model.forward, backend=counter)


def layers(model: Any, counter: CompileCounter) -> None:
    for layer in model.model.layers:
        layer.compile(backend=counter)


def wrapped_part(model: Any, counter: CompileCounter) -> None:
    model.lm_head = torch.compile(model.lm_head, backend=counter)


@pytest.mark.parametrize(
    ("give", "engine"),
    [(whole, "walk"), (forward, "device"), (layers, "walk"), (wrapped_part, "device")],
)
def test_steps_run_uncompiled_code(
    give: Callable[[Any, CompileCounter], None],
    engine: str,
    fresh: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, counter = small(), CompileCounter()
    give(model, counter)
    for _ in range(2):  # plain's prompt, first step and every later step
        model.generate(**padded("left"), **GREEDY)
    by_plain = counter.frame_count
    assert by_plain > 0
    with on(engine, monkeypatch):
        assert compare(model).engine == engine
    assert counter.frame_count == by_plain


@pytest.mark.parametrize("give", [whole, forward, layers, wrapped_part])
def test_what_is_compiled_comes_back(give: Callable[[Any, CompileCounter], None]) -> None:
    model = small()
    give(model, CompileCounter())
    before = [dict(vars(module)) for module in model.modules()]
    with patched(model):
        assert [dict(vars(module)) for module in model.modules()] != before
    assert [dict(vars(module)) for module in model.modules()] == before


def test_a_function_around_compiled_code_stays() -> None:
    model = small()
    compiled = torch.compile(model.forward, backend=CompileCounter())
    around = functools.wraps(compiled)(lambda *args, **kwargs: compiled(*args, **kwargs))
    model.forward = around
    with patched(model):
        assert vars(model)["forward"] is around
