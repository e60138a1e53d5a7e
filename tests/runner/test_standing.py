"""What a forward may read in Python is compared by value, and everything else by identity."""

from __future__ import annotations

import copy
import enum
import functools
import gc
import time
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import lookahead_hf
from lookahead_hf import compat
from lookahead_hf.runner import attention
from lookahead_hf.runner.standing import Standing, refusal, settings
from lookahead_hf.runner.values import MOST_ITEMS, Same, Values
from tests.helpers.models import prompt, tiny


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Inner:
    factors: list[float] = field(default_factory=lambda: [1.0, 2.0])


@dataclass
class Data:
    scale: Any = 1.0
    inner: Inner = field(default_factory=Inner)


@dataclass(slots=True)
class InSlots:
    scale: float = 1.0


class Plain:
    """An object of some class that keeps a factor."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale


def scaled_by(scale: float) -> Callable[[float], float]:
    return lambda x: scale * x


def double(x: float) -> float:
    return 2 * x


VALUES: dict[str, tuple[Any, Any]] = {
    "minus one and two": (-1, -2),
    "minus one and two, floats": (-1.0, -2.0),
    "zeros": (0.0, -0.0),
    "an int and a float": (1, 1.0),
    "an int and a flag": (1, True),
    "float64": (np.float64(0.3), np.float64(0.9)),
    "float32 and float64": (np.float32(1), np.float64(1)),
    "int64": (np.int64(-1), np.int64(-2)),
    "array": (np.array([1.0, 2.0]), np.array([2.0, 1.0])),
    "complex": (1j, 2j),
    "dtype": (torch.float32, torch.float16),
    "device": (torch.device("cpu"), torch.device("meta")),
    "list": ([1, [2, 3]], [1, [3, 2]]),
    "list and tuple": ([1], (1,)),
    "set": ({1, 2}, {1, 3}),
    "dict": ({"a": 1.0}, {"a": 2.0}),
    "keys": ({1: 1.0}, {2: 1.0}),
    "range": (range(2), range(3)),
    "enum": (Mode.FAST, Mode.EXACT),
    "int enum": (Level.LOW, Level.HIGH),
    "data": (Data(), Data(2.0)),
    "data in data": (Data(), Data(inner=Inner([1.0, 3.0]))),
    "slots": (InSlots(), InSlots(2.0)),
    "namespace": (types.SimpleNamespace(scale=1.0), types.SimpleNamespace(scale=2.0)),
    "object": (Plain(), Plain()),
    "closure": (scaled_by(1.0), scaled_by(2.0)),
    "partial": (functools.partial(max, 1), functools.partial(max, 2)),
    "function": (double, max),
    "method": ([].append, Plain().__init__),
    "tensor": (torch.zeros(2), torch.zeros(2)),
    "type": (Data, Inner),
    "nothing": (None, 0),
}


@pytest.mark.parametrize("name", VALUES)
def test_attributes_are_compared_by_value(name: str) -> None:
    model = tiny("llama")
    before, after = VALUES[name]
    mlp = model.model.layers[1].mlp
    mlp.kept = before
    first, standing = settings(model), Standing(model)
    assert settings(model) == first
    assert standing.is_current()
    mlp.kept = after
    assert settings(model) != first
    assert not standing.is_current()
    mlp.kept = before
    assert settings(model) == first
    assert standing.is_current()


@pytest.mark.parametrize("name", ["list", "set", "dict", "data", "slots", "namespace"])
def test_what_says_the_same_is_the_same(name: str) -> None:
    model = tiny("llama")
    mlp = model.model.layers[1].mlp
    mlp.kept = VALUES[name][0]
    first = settings(model)
    mlp.kept = copy.deepcopy(mlp.kept)
    assert settings(model) == first


def first_factor(model: Any) -> None:
    model.kept.inner.factors[0] = 5.0


def appended(model: Any) -> None:
    model.kept.inner.factors.append(5.0)


def replaced(model: Any) -> None:
    model.kept.inner = Inner([5.0])


def configured(model: Any) -> None:
    model.config.final_logit_softcapping = 5.0


def nested(model: Any) -> None:
    model.config.rope_parameters["rope_theta"] = 5.0


def hidden(model: Any) -> None:
    model.aside[0].scale = 5.0


@pytest.mark.parametrize("change", [first_factor, appended, replaced, configured, nested, hidden])
def test_writing_inside_what_a_model_holds_is_seen(change: Callable[[Any], None]) -> None:
    model = tiny("llama")
    model.kept, model.aside = Data(), [Plain()]
    first, standing = settings(model), Standing(model)
    change(model)
    assert settings(model) != first
    assert not standing.is_current()


def test_objects_of_other_objects_are_known_by_identity_only() -> None:
    model = tiny("llama")
    model.kept = Plain()
    model.kept.other = Plain()
    first = settings(model)
    model.kept.other.scale = 2.0
    assert settings(model) == first
    model.kept.other = Plain(2.0)
    assert settings(model) != first


def test_what_only_generate_reads_does_not_count() -> None:
    model = tiny("llama")
    first, standing = settings(model), Standing(model)
    model.generation_config.temperature = 0.3
    assert standing.is_current()
    lookahead_hf.enable(model)
    assert settings(model) == first


def test_circles_and_long_lists_are_read_to_an_end() -> None:
    values, circle = Values(), Data()
    circle.scale = [circle]
    values.read(circle)
    values.read(list(range(100 * MOST_ITEMS)))
    assert len(values.found) < MOST_ITEMS


def test_what_is_compared_keeps_nothing_alive() -> None:
    model = tiny("llama")
    model.kept = [Plain(), scaled_by(1.0), model.forward]
    found, gone = settings(model), weakref.ref(model.kept[0])
    model.kept = None
    gc.collect()
    assert gone() is None
    assert found != settings(model)


def test_another_object_in_the_same_place_is_another() -> None:
    first = Same(Plain())  # which is gone: the next one may have its address
    assert first != Same(Plain())
    kept = Plain()
    assert Same(kept) == Same(kept)
    assert Same(kept) != kept


def test_a_look_over_a_model_of_thirty_layers_takes_two_milliseconds() -> None:
    model = tiny("llama", num_hidden_layers=30)
    taken = []
    for _ in range(10):
        start = time.perf_counter()
        settings(model)
        taken.append(time.perf_counter() - start)
    assert min(taken) < 4e-3, "twice what it takes on a busy machine"


def test_the_hooks_that_capture_hidden_states_are_none_of_the_users() -> None:
    model = tiny("llama")
    with torch.inference_mode():
        model(prompt(), output_hidden_states=True)
        assert any(module._forward_hooks for module in model.modules())
        compat.set_attention_name(model.config, attention.OURS)
        assert refusal(model) is None
        model.model.norm.register_forward_hook(lambda *_: None)
        assert refusal(model) == "modules have hooks"
