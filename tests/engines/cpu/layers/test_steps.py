"""How layers run on a CPU: what the statistics say, and what ends in the model's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

import lookahead_hf
from lookahead_hf.call import execution
from lookahead_hf.engines.cpu.layers import CompiledLayers, groups_of
from lookahead_hf.engines.cpu.step import LayerStep
from lookahead_hf.engines.cpu.workspace import Workspace
from lookahead_hf.model import compat
from lookahead_hf.ngram_pool import compilation
from lookahead_hf.runner.forward import shared_change
from lookahead_hf.stats import SpeculativeStats
from tests.helpers import models
from tests.helpers.changes import hooked
from tests.helpers.compiled import run
from tests.helpers.compiling import Elsewhere, nothing_compiled

NUM_LAYERS = 4  # Layers of the tiny Llama. If all are served, its output layer is so, too.


def tiny(name: str) -> Any:
    return models.tiny(name, num_hidden_layers=NUM_LAYERS)


def stats_of(model: Any) -> SpeculativeStats:
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None
    return stats


def run_as_plain(model: Any, change: Callable[[], Any] | None = None) -> SpeculativeStats:
    """Write a text with the kernels allowed, which must be plain's; return the statistics."""
    expected = run(model, False).text
    assert run(model, True, change).text == expected
    return stats_of(model)


def called_by_another(model: Any, index: int = 1) -> None:
    """As `layer.compile()` does it."""
    layer = model.model.layers[index]
    vars(layer)[compat.CALL] = lambda *args, **kwargs: compat.own_call(layer, *args, **kwargs)


@pytest.mark.parametrize("in_mid_call", [False, True])
def test_another_call_of_a_layer_is_left_in_its_place(in_mid_call: bool) -> None:
    model = tiny("llama")
    run(model, True)
    if not in_mid_call:
        called_by_another(model)
    for _ in range(2):
        stats = run_as_plain(model, (lambda: called_by_another(model)) if in_mid_call else None)
        assert stats.execution == "compiled" and stats.own_code == (execution.OTHER_CALL,)
        assert stats.layers == {"compiled": NUM_LAYERS, "model": 1}


def test_the_calls_of_another_description_are_left_in_their_place() -> None:
    """Two threads have described the model, and something was changed between."""
    model = tiny("llama")
    run(model, True)
    another = CompiledLayers(model)
    with shared_change(another._users, another._install, another._remove):
        stats = run_as_plain(model)
    assert stats.execution == "model" and stats.own_code == (execution.OTHER_CALL,)
    assert run_as_plain(model).own_code == ()


@pytest.mark.parametrize("index", [1, NUM_LAYERS - 1])
def test_a_call_that_changes_while_layers_wait_runs_again(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another thread compiles a layer in the middle of a forward."""
    model, inner = tiny("llama"), LayerStep.call
    run(model, True)

    def call(self: Any, *given: Any) -> Any:
        out = inner(self, *given)
        if len(self._noted) == 1:
            called_by_another(model, index)
        return out

    monkeypatch.setattr(LayerStep, "call", call)
    stats = run_as_plain(model)
    assert stats.execution == "model" and stats.own_code == (execution.OUT_OF_ORDER,)
    monkeypatch.undo()
    assert run_as_plain(model).own_code == (execution.OTHER_CALL,)


def test_what_a_hook_has_kept_of_a_layers_input_is_not_written_to() -> None:
    model, kept = tiny("llama"), list[tuple[torch.Tensor, torch.Tensor]]()
    model.model.embed_tokens.register_forward_hook(lambda *x: kept.append((x[-1], x[-1].clone())))
    assert run_as_plain(model).execution == "compiled" and all(torch.equal(*x) for x in kept)


@pytest.mark.parametrize(
    ("of", "name"),
    [(Workspace, "run"), (LayerStep, "_arguments_of"), (CompiledLayers, "_is_whole")],
)
def test_an_error_of_ours_ends_in_the_models_own_code(
    of: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("a weight of the model has no memory")

    model = tiny("llama")
    run(model, True)
    with monkeypatch.context() as patch:
        patch.setattr(of, name, refuse)
        assert run_as_plain(model).own_code == (execution.OUT_OF_ORDER,)
    assert run_as_plain(model).own_code == ()


def test_an_error_of_a_layer_reaches_the_caller() -> None:
    model = lookahead_hf.enable(tiny("llama"))

    def fail(*_: Any) -> None:
        raise OSError("the hook's own")

    run(model, True)
    with pytest.raises(OSError, match="the hook's own"):
        run(model, True, lambda: model.model.layers[1].register_forward_hook(fail))


class Seeing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class OwnNorm(modeling_llama.LlamaRMSNorm):
    """A norm whose code nobody knows."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, 1e-6)


def with_an_own_norm(model: Any) -> None:
    model.model.layers[1].input_layernorm.__class__ = OwnNorm


@contextmanager
def compiling(patch: pytest.MonkeyPatch) -> Iterator[None]:
    with nothing_compiled(patch, compilation.common) as pending:
        pending.append(lambda: pytest.fail("it is not compiled"))
        patch.setattr(compilation.common, "is_on_disk", lambda: False)
        patch.setattr(compilation.common, "child", Elsewhere())
        yield


@contextmanager
def another_linear(patch: pytest.MonkeyPatch) -> Iterator[None]:
    linear = nn.functional.linear
    patch.setattr(nn.functional, "linear", lambda *args: linear(*args))
    yield


def autocast(_: pytest.MonkeyPatch) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=True)


def mode(_: pytest.MonkeyPatch) -> AbstractContextManager[Any]:
    return Seeing()


ALL, NONE = {"compiled": NUM_LAYERS + 1, "model": 0}, {"compiled": 0, "model": NUM_LAYERS + 1}
BUT_ONE = {"compiled": NUM_LAYERS, "model": 1}
ONE_UNKNOWN = {"compiled": NUM_LAYERS - 1, "model": 1}


@pytest.mark.parametrize(
    ("around", "change", "reason", "layers"),
    [
        (None, None, None, ALL),
        (None, hooked, execution.HOOKS, BUT_ONE),
        (None, with_an_own_norm, execution.UNKNOWN, ONE_UNKNOWN),
        (autocast, None, execution.GRADIENTS, NONE),
        (mode, None, execution.WATCHED, NONE),
        (another_linear, None, execution.FUNCTIONS, NONE),
        (compiling, None, execution.COMPILING, {}),
        (None, None, execution.NOT_ASKED_FOR, {}),
    ],
)
def test_the_statistics_say_which_layers_run_how(
    around: Any, change: Any, reason: Any, layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: LlamaForCausalLM = tiny("llama")
    if change is not None:
        change(model)
    with nullcontext() if around is None else around(monkeypatch):
        run(model, reason != execution.NOT_ASKED_FOR)
    stats = stats_of(model)
    assert stats.layers == layers
    assert stats.execution == ("compiled" if layers.get("compiled") else "model")
    said = str(stats)
    if reason is None:
        assert stats.own_code == () and "own code" not in said
    else:
        assert len(stats.own_code) == 1 and stats.own_code[0].startswith(reason)
        count = f"{layers['model']} of {sum(layers.values())}" if layers else "all"
        assert f"the model's own code ran {count} layers: {reason}" in said
    assert stats.to_dict()["own_code"] == list(stats.own_code)
    assert stats.to_dict()["layers"] == layers


def test_a_model_needs_the_kernels_of_its_dtypes() -> None:
    model = tiny("llama").half()
    assert [each.name for each in groups_of(model)] == ["float16", "common", "drafting"]
    model.lm_head.float()
    assert [each.name for each in groups_of(model)][:2] == ["float16", "float32"]
    assert [each.name for each in groups_of(tiny("llama").double())] == ["drafting"]


def test_kernels_are_loaded_at_the_beginning_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loaded = tiny("llama").half(), list[str]()
    with nothing_compiled(monkeypatch, compilation.kernels["float16"]) as pending:
        pending.append(lambda: loaded.append("float16"))
        run(model, True)
    assert loaded == ["float16"] and stats_of(model).execution == "compiled"


def test_the_latest_step_counts() -> None:
    model = tiny("llama")

    def watch() -> None:
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        handles.append(handle)

    handles: list[Any] = []
    run(model, True)
    try:
        run(model, True, watch)
    finally:
        handles[0].remove()
    stats = stats_of(model)
    assert stats.execution == "model" and stats.own_code == (execution.HOOKS,)
    assert stats.layers == NONE
    joined = lookahead_hf.totals(model).stats
    assert joined.execution == "compiled, model" and joined.own_code == (execution.HOOKS,)
    assert joined.layers == NONE
