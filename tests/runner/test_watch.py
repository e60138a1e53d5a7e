"""Models that graphs cannot serve are run, and graphs are used for the model they captured only."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from lookahead_hf.call import execution
from lookahead_hf.runner import watch
from lookahead_hf.runner.patched import patched
from lookahead_hf.runner.watch import Watch
from tests.helpers import changes
from tests.helpers.calls import padded
from tests.helpers.device import HostReads, Tape, TapeRecorder
from tests.helpers.models import tiny
from tests.helpers.replayed import Switch, compare, sets_of, small, streamed


@pytest.fixture
def no_global_hooks() -> Iterator[None]:
    """Hooks on all modules go when the test ends."""
    yield
    torch.nn.modules.module._global_forward_hooks.clear()


class Wrapped:
    """A tensor with its numbers in another one, as quantised weights are."""

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


def test_weights_in_wrappers_are_told_apart() -> None:
    weights = torch.randn(2, 3), torch.randn(2, 3)
    assert watch.addresses(Wrapped(weights[0])) == watch.addresses(weights[0])
    assert watch.addresses(Wrapped(weights[0])) != watch.addresses(weights[1])


def put(name: str, value: Any) -> Callable[[Any], None]:
    """A change of an attribute of a layer."""
    return lambda model: setattr(model.model.layers[1].mlp, name, value)


def hook_all(model: Any) -> None:
    def scaled(module: Any, args: Any, output: Any) -> Any:
        return output * 1.5 if module is model.model.layers[1].mlp else output

    torch.nn.modules.module.register_module_forward_hook(scaled)


def watched(model: Any) -> Watch:
    return Watch(model.modules(), is_graph=True)


def blockers(model: Any, **extras: Any) -> list[str]:
    return watch.blockers(model, extras)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changes.hooked, execution.HOOKS),
        (changes.pre_hooked, execution.HOOKS),
        (hook_all, execution.HOOKS),
        (changes.replaced_forward, execution.REPLACED),
        (put("_hf_hook", object()), execution.OFFLOADED),
    ],
)
def test_what_a_graph_would_pass_over_is_named(
    change: Callable[[Any], None], reason: str, no_global_hooks: None
) -> None:
    model = small()
    change(model)
    assert blockers(model) == [reason]


@pytest.mark.parametrize(
    "change", [each for each in changes.CHANGES if each not in changes.IN_PLACE]
)
def test_a_change_is_noticed(change: Callable[[Any], None]) -> None:
    """Between two calls, and within one."""
    model = changes.adapted(partial(tiny, "llama", num_hidden_layers=3))
    before = watched(model)
    assert before.is_current()
    change(model)
    assert not before.is_current()
    assert watched(model).key != before.key or watch.blockers(model, {})


@pytest.mark.parametrize(
    ("mode", "extras", "found"),
    [
        (HostReads, {}, [execution.WATCHED]),
        (Tape, {}, [execution.WATCHED]),
        (lambda: torch.device("cpu"), {}, []),
        (lambda: torch.autocast("cpu", torch.bfloat16), {}, [execution.AUTOCAST]),
        (nullcontext, {"logits_to_keep": 1}, []),
        (nullcontext, {"token_type_ids": torch.zeros(1, 5)}, [execution.TENSORS]),
    ],
)
def test_modes_and_further_tensors(mode: Any, extras: dict[str, Any], found: list[str]) -> None:
    model = small()
    with mode():
        assert blockers(model, **extras) == found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's, when it is imported
def test_compiled_forwards_are_the_models_own() -> None:
    model = small()
    model.model.forward = torch.compile(model.model.forward, backend="eager")
    model.lm_head = torch.compile(model.lm_head, backend="eager")
    with patched(model):
        assert blockers(model) == []
    model.model.norm.forward = torch.compile(lambda x: x, backend="eager")
    with patched(model):
        assert blockers(model) == [execution.REPLACED]


@pytest.mark.parametrize(
    "change",
    [
        put("scaling", {"default": 2.0, "ranks": [4, 8]}),
        lambda model: model.model.layers[1].mlp.scaling.update(default=2.0),
        lambda model: model.model.layers[1].mlp.scaling["ranks"].append(16),
        lambda model: model.model.layers[1].mlp.scaling["ranks"].reverse(),
        put("zero", -0.0),
        put("active", "other"),
        put("function", lambda x: x),
        put("constant", torch.ones(3)),
        lambda model: model.model.layers[1].train(),
        lambda model: setattr(model.config, "rope_theta", 3.0),
    ],
)
def test_what_modules_hold_is_in_the_key(change: Callable[[Any], None]) -> None:
    model = small()
    put("scaling", {"default": 1.0, "ranks": [4, 8]})(model)
    for name, value in (("zero", 0.0), ("active", "default"), ("function", abs)):
        put(name, value)(model)
    put("constant", torch.ones(3))(model)
    before = watched(model)
    put("scaling", {"default": 1.0, "ranks": [4, 8]})(model)  # other objects, the same numbers
    assert watched(model).key == before.key
    before = watched(model)
    assert hash(watched(model).key) == hash(before.key)
    assert before.is_current()
    change(model)
    assert watched(model).key != before.key
    assert not before.is_current()


SETTINGS: tuple[Callable[[Any], None], ...] = (
    lambda patch: patch.setenv("LOOKAHEAD_HF_BACKEND", "torch"),
    lambda patch: patch.setattr(torch.backends.cuda, "math_sdp_enabled", lambda: False),
    lambda patch: patch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: "lt"),
)
FUNCTIONS: tuple[Callable[[Any], None], ...] = (
    lambda patch: patch.setitem(AttentionInterface._global_mapping, "sdpa", print),
    lambda patch: patch.setitem(AttentionInterface._global_mapping, "eager", print),
    lambda patch: patch.setattr(torch.nn.functional, "scaled_dot_product_attention", print),
)


@pytest.mark.parametrize("change", [*SETTINGS, *FUNCTIONS])
def test_settings_of_the_process_and_functions_of_users_are_in_the_key(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOOKAHEAD_HF_BACKEND", raising=False)
    before = watched(model := small())
    change(monkeypatch)
    assert watched(model).key != before.key
    assert before.is_current() == (change in SETTINGS)  # in a call functions alone are watched


PRECISION = """
import torch

before = guards.watched(model := guards.small()).key
torch.backends.cuda.matmul.fp32_precision = "tf32"
assert guards.watched(model).key != before
"""


def test_precisions_of_float32_are_in_the_key() -> None:
    """In a process of its own, since torch's older getter raises from then on."""
    code = f"import {__name__} as guards\n{PRECISION}"
    subprocess.run([sys.executable, "-c", code], check=True)


def fused(self: Any, x: torch.Tensor) -> torch.Tensor:
    return type(self).forward(self, x)


def other_fused(self: Any, x: torch.Tensor) -> torch.Tensor:
    return -type(self).forward(self, x)


@pytest.mark.parametrize("who", ["liger", "hub"])
def test_fused_kernels_are_captured(
    who: str, made: list[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both put a bound function in the place of a module's forward."""
    model = small()
    norm, reads_more = model.model.norm, [2.0]
    if who == "liger":
        for each in (fused, other_fused):
            monkeypatch.setattr(each, "__module__", "liger_kernel.transformers.rms_norm")
    else:
        monkeypatch.setattr(type(norm), "kernel_layer_name", "RMSNorm", raising=False)
    for each in (fused, other_fused):
        norm.forward = MethodType(each, norm)
        assert compare(model, padded("left")).execution == "replayed"
    assert len(sets_of(made)) == 2
    norm.forward = MethodType(lambda self, x: other_fused(self, x) * reads_more[0], norm)
    assert compare(model, padded("left")).execution == execution.REPLACED
    norm.forward = MethodType(fused, model)
    assert blockers(model) == [execution.REPLACED]


def test_forwards_of_a_class_are_told_apart(
    made: list[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    kind = type(model.model.norm)
    own = kind.forward

    def scaled_by(factor: float) -> Callable[..., Any]:
        return lambda self, x: own(self, x) * factor * (1.0 + 0.01 * x.sign())

    for factor in (-1.0, 2.0, 3.0):  # the third may get the first one's place in memory
        monkeypatch.setattr(kind, "forward", scaled_by(factor))
        assert compare(model, padded("none")).execution == "replayed"


@pytest.mark.parametrize("change", [changes.rescaled, changes.hooked, changes.replaced_data])
def test_changes_in_the_middle_of_a_call_count(
    change: Callable[[Any], None], made: list[TapeRecorder], no_global_hooks: None
) -> None:
    texts = []
    for asked in (False, True):
        torch.nn.modules.module._global_forward_hooks.clear()
        model = small()
        before, _ = streamed(model, asked)
        text, stats = streamed(model, asked, Switch({11: lambda m=model: change(m)}))
        assert text != before
        texts.append((before, text))
    assert texts[0] == texts[1]
    assert stats.execution == execution.CHANGED
    assert num_replays(made) > 0


def num_replays(made: list[TapeRecorder]) -> int:
    return sum(each.num_replays for recorder in made for each in recorder.recordings)


def test_graphs_are_used_again_where_a_change_was_undone(made: list[TapeRecorder]) -> None:
    texts = []
    for asked in (False, True):
        model = small()
        streamed(model, asked)
        own, before = model.model.layers[1].self_attn.scaling, num_replays(made)

        def put(value: float, model: Any = model) -> None:
            model.model.layers[1].self_attn.scaling = value

        switch = Switch({9: partial(put, -3 * own), 21: partial(put, own)})
        text, stats = streamed(model, asked, switch)
        texts.append(text)
    assert texts[0] == texts[1]
    assert stats.execution == "replayed"
    assert 0 < num_replays(made) - before < stats.num_steps
