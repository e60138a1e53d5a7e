"""Norms that one compiled function computes have the bits of the model's own, or are left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from lookahead_hf.runner import norm_calls, stand_ins
from tests.helpers.models import tiny
from tests.helpers.packing import Bits, in_a_forward, run


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows of each norm that the compiled function computes."""
    functions, counts = norm_calls._functions(), list[int]()

    def norm(*args: Any) -> None:
        counts.append(args[3])
        functions.norm(*args)

    counting = SimpleNamespace(norm=norm, means_of_squares=functions.means_of_squares)
    monkeypatch.setattr(norm_calls, "_functions", lambda: counting)
    return counts


def half_norm(size: int, kind: type = LlamaRMSNorm) -> Any:
    module = kind(size, 1e-5).bfloat16()
    nn.init.normal_(module.weight)
    return module


def stand_in_of(module: Any) -> Any:
    thread = stand_ins.OnThread()
    thread.depth = 1
    return norm_calls._StandIn(thread, module)


def half() -> Any:
    return tiny("llama").bfloat16()


# 100 is no whole number of registers, 8192 needs two levels of sums.
@pytest.mark.parametrize("size", [3, 8, 100, 576, 8192])
@torch.no_grad()
def test_no_bit_changes(size: int) -> None:
    module = half_norm(size)
    stand_in = stand_in_of(module)
    assert norm_calls._has_same_bits(module)
    rows = norm_calls.MOST_NUMBERS // size
    for _ in range(2_000 // rows + 1):
        x = (torch.randn(1, rows, size) * 10.0 ** torch.randn(1, rows, 1)).bfloat16()
        x[0, 0, 0], x[0, 1, 0], x[0, 2] = torch.nan, torch.inf, 0.0
        out = stand_in(x)
        assert out.shape == x.shape and out.dtype == x.dtype
        torch.testing.assert_close(out, module(x), rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def test_a_row_of_zeros_without_epsilon_is_nan_as_in_torch() -> None:
    module = LlamaRMSNorm(8, 0.0).bfloat16()
    x = torch.zeros(2, 8).bfloat16()
    x[1] = 1.0
    out = stand_in_of(module)(x)
    torch.testing.assert_close(out, module(x), rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def test_other_threads_call_the_module(computed: list[int]) -> None:
    module = half_norm(64)
    norms = norm_calls.NormCalls([module])
    x = torch.randn(2, 64).bfloat16()
    computed.clear()  # of the trial
    with norms.step(), ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(torch.no_grad()(module), x).result(), module(x))
    assert computed == [2]


def test_norms_are_left_to_torch_where_they_cannot_be_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(norm_calls, "_functions", broken)
    monkeypatch.setattr(norm_calls, "_same_bits", {})
    norm_calls._warm_up()
    assert not norm_calls._has_same_bits(half_norm(8))


def without_norms(model: Any, change: Callable[[], Any] | None = None) -> Bits:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm_calls, "_RSQRT", None)
        return run(model, False, change)


def with_norms(model: Any, change: Callable[[], Any] | None = None) -> Bits:
    return run(model, False, change)


RUNS = without_norms, with_norms


def changed(
    runs: Callable[..., Bits], model: Any, change: Callable[[], Any], in_mid_call: bool
) -> Bits:
    """Run a model that is changed before the call or in the middle of it."""
    if not in_mid_call:
        change()
    return runs(model, change if in_mid_call else lambda: None)


def test_a_call_has_the_same_bits(computed: list[int]) -> None:
    model = half()
    own = without_norms(model)
    computed.clear()  # of the trial
    assert with_norms(model) == own
    assert computed
    assert not any(stand_ins.CALL in vars(module) for module in model.modules())


def norm_of(model: Any) -> Any:
    return model.model.layers[1].input_layernorm


def hooked(model: Any) -> None:
    norm_of(model).register_forward_hook(lambda m, args, out: out * 2)


def pre_hooked(model: Any) -> None:
    norm_of(model).register_forward_pre_hook(lambda m, args: (args[0][..., :1] + args[0],))


def replaced_forward(model: Any) -> None:
    norm_of(model).forward = lambda x: x * 2


def replaced_weight(model: Any) -> None:
    norm_of(model).weight = nn.Parameter(-norm_of(model).weight.detach())


def replaced_data(model: Any) -> None:
    norm_of(model).weight.data = -norm_of(model).weight.data


def other_epsilon(model: Any) -> None:
    norm_of(model).variance_epsilon = 0.5


def other_class(model: Any) -> None:
    class Doubled(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) * 2

    norm_of(model).__class__ = Doubled


CHANGES = (
    hooked, pre_hooked, replaced_forward, replaced_weight, replaced_data, other_epsilon, other_class
)  # fmt: skip


@pytest.mark.parametrize("when", ["before the call", "in mid call", "in a forward"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_counts_at_once(
    change: Callable[[Any], None], when: str, computed: list[int]
) -> None:
    found, in_mid_call = [], when != "before the call"
    change = in_a_forward(change) if when == "in a forward" else change
    for runs in RUNS:
        model = half()
        found.append(changed(runs, model, lambda model=model: change(model), in_mid_call))
    assert found[0] == found[1] and computed


@pytest.mark.parametrize("in_mid_call", [False, True])
def test_a_patched_class_counts_at_once(in_mid_call: bool) -> None:
    forward, found = LlamaRMSNorm.forward, []
    for runs in RUNS:
        with pytest.MonkeyPatch.context() as patch:

            def change(patch: pytest.MonkeyPatch = patch) -> None:
                patch.setattr(LlamaRMSNorm, "forward", lambda *given: forward(*given) * 0.5)

            found.append(changed(runs, half(), change, in_mid_call))
    assert found[0] == found[1] != with_norms(half())


def test_inputs_of_another_kind_are_the_modules_own(computed: list[int]) -> None:
    module = half_norm(64)
    stand_in = stand_in_of(module)
    x = torch.randn(4, 6, 64).bfloat16()
    assert stand_in(x).requires_grad  # a gradient is asked for
    with torch.no_grad():
        large = torch.randn(norm_calls.MOST_NUMBERS // 64 + 1, 64).bfloat16()
        for given in (x.float(), x.transpose(0, 1), x[..., :1], large):
            assert torch.equal(stand_in(given), module(given))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(stand_in(x), module(x))
        module.weight.data = module.weight.data.float()
        assert stand_in(x).dtype == torch.float32
    assert not computed


def test_norms_of_other_kinds_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(LlamaRMSNorm):
        pass

    assert norm_calls._is_served(half_norm(8)) and norm_calls._is_served(half_norm(8, Qwen3RMSNorm))
    others = [half_norm(8, Gemma3RMSNorm), half_norm(8, Own), LlamaRMSNorm(8), nn.LayerNorm(8)]
    assert not any(map(norm_calls._is_served, others))
    monkeypatch.setattr(norm_calls, "_same_bits", {})
    other_order = SimpleNamespace(
        norm=norm_calls._functions().norm, means_of_squares=lambda means, *_: means.fill(1.0)
    )
    monkeypatch.setattr(norm_calls, "_functions", lambda: other_order)
    assert not norm_calls._has_same_bits(half_norm(8))
