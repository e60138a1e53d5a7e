"""Whether programs of layers stay within weights, buffers and caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lookahead_hf.engines.cpu.descriptions import describe_layer, describe_linear
from lookahead_hf.engines.cpu.kernels import fields
from lookahead_hf.engines.cpu.kernels.program import MOST_TOKENS, Plan
from lookahead_hf.engines.cpu.programs import Unknown
from lookahead_hf.engines.cpu.step import LayerStep
from lookahead_hf.engines.cpu.workspace import CompiledLayer, Workspace
from lookahead_hf.runner.forward import ForwardContext
from lookahead_hf.runner.watch import Watch
from tests.helpers.bounds import bounds_checked, check_plan
from tests.helpers.caches import CACHE
from tests.helpers.changes import freed, on_meta, shrunk
from tests.helpers.compiled import run
from tests.helpers.models import tiny
from tests.helpers.slots import cache_of

NAMES = ("llama", "qwen3", "mistral", "gemma3")


def cut(module: Any, rows: int, columns: int | None = None) -> None:
    module.weight = nn.Parameter(module.weight[:rows, :columns].clone())


def shorter(norm: Any) -> None:
    norm.weight = nn.Parameter(norm.weight[:-1].clone())


CUTS: dict[str, Callable[[Any], None]] = {
    "q": lambda layer: cut(layer.self_attn.q_proj, -12),
    "k": lambda layer: cut(layer.self_attn.k_proj, -12),
    "v": lambda layer: cut(layer.self_attn.v_proj, -12),
    "columns of q": lambda layer: cut(layer.self_attn.q_proj, 48, 40),
    "columns of o": lambda layer: cut(layer.self_attn.o_proj, 48, 40),
    "rows of o": lambda layer: cut(layer.self_attn.o_proj, 40),
    "gate": lambda layer: cut(layer.mlp.gate_proj, 90),
    "up": lambda layer: cut(layer.mlp.up_proj, 90),
    "columns of up": lambda layer: cut(layer.mlp.up_proj, 96, 40),
    "columns of down": lambda layer: cut(layer.mlp.down_proj, 48, 90),
    "rows of down": lambda layer: cut(layer.mlp.down_proj, 40),
    "first norm": lambda layer: shorter(layer.input_layernorm),
    "second norm": lambda layer: shorter(layer.post_attention_layernorm),
}


@pytest.mark.parametrize("name", CUTS)
def test_weights_that_do_not_fit_are_not_computed(name: str) -> None:
    layer = tiny("llama").model.layers[0]
    describe_layer(layer)
    CUTS[name](layer)
    with pytest.raises(Unknown):
        describe_layer(layer)


@pytest.mark.parametrize("change", [on_meta, freed])
def test_a_weight_without_memory_is_not_computed(change: Callable[[Any], None]) -> None:
    model = tiny("llama")
    program = describe_layer(model.model.layers[1])
    change(model)
    assert change is freed or not program.watch.are_modules_current()
    with pytest.raises(Unknown):
        describe_layer(model.model.layers[1])


def of_other_dtype(model: Any) -> None:
    """As another thread moves a model after its layers were noted."""
    model.to(torch.bfloat16)


@pytest.mark.parametrize("change", [freed, shrunk, of_other_dtype])
def test_memory_is_asked_for_again_before_it_is_read(change: Callable[[Any], None]) -> None:
    module = (model := tiny("llama")).model.layers[1].mlp.up_proj
    x, out = torch.randn(1, 48), torch.empty(1, 96)
    given = np.array([[x.data_ptr(), out.data_ptr(), *7 * [0]]])
    workspace = Workspace([layer := CompiledLayer(module, describe_linear(module), 0)])
    workspace.run([layer], given, 1, 0)
    torch.testing.assert_close(out, module(x))
    change(model)
    with pytest.raises(RuntimeError, match="freed or changed within a forward"):
        workspace.run([layer], given, 1, 0)


@pytest.mark.parametrize("name", ["k_store", "v_store"])
def test_a_store_of_other_slots_than_the_cache_is_not_written(name: str) -> None:
    cache = cache_of(None, [3, 3])
    stores = cache.each_group()[0].layers[0]
    given = {"layer_index": 0, "shared_heads": 1, "head_dim": stores.k_store.shape[3]}
    program = SimpleNamespace(dtype=stores.k_store.dtype, is_rotated=False, **given)
    layer: Any = SimpleNamespace(program=program, attention=SimpleNamespace(config=None))
    step: Any = LayerStep(Workspace([]), None, Watch([]), ForwardContext())
    step._shared_by_layers = lambda *_: (0, 0, 0, 0, 0)
    for cut in (slice(None), (slice(None), slice(-1)), slice(1)):
        kept = getattr(stores, name)
        setattr(stores, name, kept[cut].clone())
        given = step._arguments_of([(layer, {CACHE: cache})], torch.zeros(2, 1, 8))
        assert (given is None) == (cut != slice(None))
        setattr(stores, name, kept)


@pytest.fixture
def checked() -> Iterator[list[CompiledLayer]]:
    with bounds_checked() as done:
        yield done


@pytest.mark.parametrize("name", NAMES)
def test_families_stay_within_bounds(name: str, checked: list[CompiledLayer]) -> None:
    assert run(tiny(name), True).execution == "compiled"
    assert len(checked) > 20


def test_a_program_out_of_bounds_raises(
    checked: list[CompiledLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = tiny("llama").model.layers[1].mlp.up_proj, torch.randn(1, 48)
    out = torch.empty(1, 96)
    given = np.array([[x.data_ptr(), out.data_ptr(), *7 * [0]]])
    layer = CompiledLayer(module, describe_linear(module), 0)
    workspace = Workspace([layer])
    workspace.run([layer], given, 1, 0)
    with pytest.raises(IndexError, match="the address of stream"):
        workspace.run([layer], 0 * given, 1, 0)
    with pytest.raises(IndexError, match="tokens"):
        workspace.run([layer], given, MOST_TOKENS + 1, 0)
    monkeypatch.setattr(workspace, "_floats", lambda _: 0)
    with pytest.raises(IndexError, match="scratch of operation 0"):
        workspace.run([layer], given, 1, 0)
    layer.program.places[2] = layer.program.places[2]._replace(offset=4 * 48)
    with pytest.raises(IndexError, match=f"field {fields.WEIGHT} of operation 0"):
        Workspace([layer]).run([layer], given, 1, 0)


def test_a_plan_out_of_bounds_raises() -> None:
    above, one = np.array([[-1, -1]]), np.ones(1, np.int64)
    none = np.zeros((0, 0), np.int64)
    part = above, 2 * one, 3 * one, above, none, none, 0 * one
    plan = Plan(np.array([3, 4]), [part])
    check_plan(plan, 1, 8)
    with pytest.raises(IndexError, match="slots"):
        check_plan(plan, 1, 4)
    for field, value in ((fields.ROW_SLOT, 8), (fields.END, 9), (fields.COUNT, 3)):
        kept = plan.segments[0, field]
        plan.segments[0, field] = value
        with pytest.raises(IndexError, match="outside of their room"):
            check_plan(plan, 1, 8)
        plan.segments[0, field] = kept
    assert plan.tails.tolist() == [3, 4]
    plan.tails[:] = 8
    with pytest.raises(IndexError, match="tails"):
        check_plan(plan, 1, 8)
