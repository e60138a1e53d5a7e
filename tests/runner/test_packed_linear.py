"""Steps with packed layers write the model's own text, whatever happens to the model."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

import lookahead_hf
from lookahead_hf.model_state import state_of
from lookahead_hf.runner import packed_linear, packed_steps, packed_weights, stand_ins
from lookahead_hf.runner.packed_steps import PackedSteps
from tests.helpers.changes import (
    adapted,
    given_a_bias,
    hooked,
    lora_of,
    merged,
    replaced_data,
    replaced_parameter,
)
from tests.helpers.compared import compared
from tests.helpers.models import prompt, tiny
from tests.helpers.packing import (
    in_a_forward,
    in_threads,
    num_products,
    pack_all,
    run,
    run_packed,
)

SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 40}


@pytest.fixture(autouse=True)
def packs(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_all(monkeypatch)


def half(name: str = "llama", **own: Any) -> Any:
    return tiny(name, **own).bfloat16()


def laid(model: Any) -> list[Any]:
    """Modules under which something lies."""
    return [module for module in model.modules() if stand_ins.CALL in vars(module)]


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi"])
def test_no_bit_changes(name: str) -> None:
    model = half(name)
    own = run(model, packed=False)
    assert (own.execution, own.num_products) == ("model", 0)
    assert run_packed(model)[:2] == own[:2]
    assert run(model, packed=False) == own
    assert laid(model) == []


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("settings", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
def test_float32_writes_plains_text(rows: int, settings: dict[str, Any]) -> None:
    model = lookahead_hf.enable(tiny("llama"))
    call = {"input_ids": prompt(rows), "max_new_tokens": 40, "pad_token_id": 0, **settings}
    for _ in range(2):
        stats = compared(model, lambda: dict(call), 12, packed_weights=True).stats
        assert stats.execution == "packed"
    kept = state_of(model).packed
    assert kept is not None and not kept.same_bits


@pytest.mark.parametrize(
    ("dtype", "execution"), [(torch.float32, "model"), (torch.bfloat16, "packed")]
)
def test_invariance_allows_no_other_rounding(dtype: torch.dtype, execution: str) -> None:
    model = lookahead_hf.enable(tiny("llama").to(dtype))
    call = {"input_ids": prompt(), "max_new_tokens": 24, "do_sample": False}
    fields = {"packed_weights": True, "draft_invariant": True}
    assert compared(model, lambda: dict(call), 12, **fields).stats.execution == execution


# What a forward reads in Python.


def by_a_patched_function(patch: pytest.MonkeyPatch) -> None:
    rotate = modeling_llama.apply_rotary_pos_emb
    patch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, c, s, *a: rotate(q, k, -c, s, *a)
    )


def by_the_class_of_linear_layers(patch: pytest.MonkeyPatch) -> None:
    forward = nn.Linear.forward
    patch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) * 0.5)


def by_functional_linear(patch: pytest.MonkeyPatch) -> None:
    linear = nn.functional.linear
    patch.setattr(nn.functional, "linear", lambda *args: linear(*args) * 0.5)


@pytest.mark.parametrize("in_mid_call", [False, True])
@pytest.mark.parametrize(
    "change", [by_a_patched_function, by_the_class_of_linear_layers, by_functional_linear]
)
def test_what_a_forward_reads_counts_at_once(
    change: Callable[[pytest.MonkeyPatch], None], in_mid_call: bool
) -> None:
    before = run_packed(half())
    assert changed_alike(half, change, in_mid_call).text != before.text


def changed_alike(make: Callable[[], Any], change: Callable[..., None], in_mid_call: bool) -> Any:
    """Change a model that is packed and one that is not; assert the same bits, and return them."""
    results = []
    for packed in (False, True):
        model = make()
        if packed:
            run_packed(model)
        with pytest.MonkeyPatch.context() as patch:
            given = patch if change.__code__.co_varnames[:1] == ("patch",) else model
            if in_mid_call:
                results.append(run(model, packed, lambda given=given: change(given)))
            else:
                change(given)
                results.append(run(model, packed))
        assert laid(model) == []
    assert results[0][:2] == results[1][:2]
    return results[0]


# What modules hold.


def switched(model: Any) -> None:
    lora_of(model).is_on = False


@torch.no_grad()
def trained(model: Any) -> None:
    lora_of(model).up.weight.mul_(-9.0)


def replaced_module(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = nn.Linear(48, 96, bias=False, dtype=torch.bfloat16)
    model.model.layers[1].mlp.up_proj.weight.data.fill_(0.1)


def pre_hooked(model: Any) -> None:
    layer = model.model.layers[1].mlp.up_proj
    layer.register_forward_pre_hook(
        lambda m, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True
    )


def replaced_forward(model: Any) -> None:
    """As accelerate does for its own hooks."""
    layer = model.model.layers[1].mlp.down_proj
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) * 2


def other_class(model: Any) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model.model.layers[1].mlp.up_proj.__class__ = Doubled


CHANGES = (
    switched, trained, replaced_parameter, replaced_data, replaced_module, given_a_bias, hooked,
    pre_hooked, replaced_forward, other_class,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("in_mid_call", [False, True])
def test_a_change_to_the_model_counts_at_once(change: Any, in_mid_call: bool) -> None:
    before = run_packed(adapted(half))
    assert changed_alike(partial(adapted, half), change, in_mid_call).logits != before.logits


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_within_a_forward_counts_at_once(change: Any) -> None:
    before = run(adapted(half), packed=False)
    changed = changed_alike(partial(adapted, half), in_a_forward(change), in_mid_call=True)
    assert changed.logits != before.logits


def test_writes_through_data_count_from_the_next_call_on() -> None:
    before = run_packed(adapted(half))
    assert changed_alike(partial(adapted, half), merged, in_mid_call=False).logits != before.logits
    model = adapted(half)
    run_packed(model)
    run(model, True, lambda: lora_of(model).merge())
    assert run(model, packed=True)[:2] == run(model, packed=False)[:2]


def test_another_dtype_counts() -> None:
    model = half()
    run_packed(model)
    own = run(model.to(torch.float32), packed=False)
    assert run(model, packed=True).text == own.text
    model.bfloat16()
    assert run_packed(model)[:2] == run(model, packed=False)[:2]


class Watching(torch.overrides.TorchFunctionMode):
    """Counts multiplications by weights."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is nn.functional.linear
        return func(*args, **(kwargs or {}))


def test_whoever_watches_sees_the_models_own_calls() -> None:
    model = half()
    run_packed(model)
    with Watching() as watching:
        bits = run(model, packed=True)
    assert bits.num_products == 0 and watching.count > 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(model, packed=True).num_products == 0
    torch.set_num_threads((threads := torch.get_num_threads()) + 1)
    try:
        assert run(model, packed=False)[:2] == run(model, packed=True)[:2]
    finally:
        torch.set_num_threads(threads)


# Layers of one input.


class Joined(nn.Module):
    """Layers of one input, as attention and gated units have them, and one that stands alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(64, size, bias=False, dtype=torch.bfloat16) for size in (96, 32, 64)
        )
        self.writes: bool | str = False
        self.twice, self.skips = False, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0
        gate = torch.sigmoid(self.first(x).view(x.shape[0], -1).view(*x.shape[:-1], 3, 32))
        if self.writes:
            (x if self.writes is True else x.data).mul_(2)
        if self.twice:
            gate = gate + self.first(x).mul_(3).view(gate.shape)
            gate = gate + self.first(x).view(gate.shape)
        second = x[..., :32] if self.skips else self.second(x)
        return self.last(torch.cat([gate.mean(-2) * second] * 2, -1))


def stepping(model: nn.Module) -> tuple[PackedSteps, list[int]]:
    """What packs a module in a step, and how many layers it has joined."""
    steps = PackedSteps(model, True)
    with torch.no_grad(), steps.step():
        model(torch.randn(1, 5, 64).bfloat16())
    kept = state_of(model).packed
    assert kept is not None and kept.stand_ins is not None
    return steps, sorted(len(each.sizes) for each in kept.stand_ins)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("setting", ["", "writes", "twice", "skips"])
def test_layers_of_one_input_are_joined(setting: str, inference: bool) -> None:
    model = Joined()
    steps, sizes = stepping(model)
    assert sizes == [1, 2, 2]
    if setting:
        setattr(model, setting, True)
    x = torch.randn(2, 5, 64).bfloat16()
    with torch.inference_mode(inference), torch.no_grad():
        x = x.clone()
        own = model(x)
        with steps.step():
            assert torch.equal(model(x), own)
        assert steps.is_used
        kept = state_of(model).packed
        assert kept is not None and kept.thread.product == stand_ins.NO_PRODUCT


@pytest.mark.parametrize("writes", [True, "through .data"])
def test_layers_whose_input_is_written_to_between_them_are_not_joined(writes: bool | str) -> None:
    model = Joined()
    model.writes = writes
    assert stepping(model)[1] == [1, 1, 1]


def test_a_model_of_another_dtype_is_packed_anew() -> None:
    model = Joined().double()
    steps = PackedSteps(model, True)
    with torch.no_grad(), steps.step():
        model(torch.randn(1, 5, 64).double())
    assert not steps.is_used
    assert stepping(model.bfloat16())[1] == [1, 2, 2]


def test_more_tokens_than_were_tried_are_the_layers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "served_tokens", lambda group: range(1, 9))
    model = Joined()
    steps, _ = stepping(model)
    with torch.no_grad(), steps.step():
        model(torch.randn(2, 5, 64).bfloat16())
    assert not steps.is_used


def test_an_exception_leaves_the_modules_as_they_were() -> None:
    model = Joined()
    for _ in range(2):
        steps = PackedSteps(model, True)
        with pytest.raises(RuntimeError), torch.no_grad(), steps.step():
            model(torch.randn(1, 5, 63).bfloat16())
        assert laid(model) == []
        stepping(model)


def test_gradients_flow_inside_a_step() -> None:
    model = Joined()
    steps, _ = stepping(model)
    with steps.step():
        model(torch.randn(1, 5, 64).bfloat16()).sum().backward()
    assert model.first.weight.grad is not None


# Threads, copies, lifetime.


def test_threads_share_packed_layers() -> None:
    model = half()
    run_packed(model)
    prompts = [prompt(seed=seed) for seed in range(4)]
    call = {"max_new_tokens": 40, "do_sample": False}
    plain = [model.generate(ids, **call).tolist() for ids in prompts]
    found: dict[int, Any] = {}

    def speculate(index: int) -> None:
        config = lookahead_hf.SpeculativeConfig(budget=8, packed_weights=True)
        output = model.generate(prompts[index], **call, speculative=config)
        stats = lookahead_hf.last_stats(model)
        assert stats is not None and stats.fallback_reason is None
        found[index] = output.tolist(), stats.execution, stats.num_accepted > 0

    in_threads(*[lambda index=index: speculate(index) for index in range(4)])
    assert [found[index] for index in range(4)] == [(text, "packed", True) for text in plain]
    assert laid(model) == []


def test_other_threads_take_the_modules_own_path() -> None:
    model = Joined()
    steps, _ = stepping(model)
    x = torch.randn(1, 5, 64).bfloat16()
    kept = state_of(model).packed
    assert kept is not None
    products: list[int] = []

    def forward() -> None:
        with torch.no_grad():
            model(x)
        products.append(kept.thread.num_products)

    with torch.no_grad(), steps.step():
        assert laid(model)
        in_threads(forward)
        model(x)
    assert products == [0] and steps.is_used


def test_a_model_can_be_copied_and_saved_in_a_step(tmp_path: Any) -> None:
    model = half()
    run_packed(model)
    copies: list[Any] = []

    def copied(*_: Any) -> None:
        if laid(model) and not copies:
            copies.extend([copy.deepcopy(model), pickle.loads(pickle.dumps(model.lm_head))])
            model.save_pretrained(tmp_path)

    handle = model.model.layers[1].register_forward_hook(copied)
    bits = run(model, packed=True)
    handle.remove()
    assert len(copies) == 2 and not any(map(laid, copies))
    copies[0].model.layers[1]._forward_hooks.clear()
    assert run(copies[0], packed=False)[:2] == bits[:2]
    assert torch.equal(type(model).from_pretrained(tmp_path).lm_head.weight, model.lm_head.weight)


def test_what_is_kept_does_not_keep_the_model() -> None:
    model = half()
    model.lm_head.register_forward_hook(lambda *_, model=model: None)
    run_packed(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


# When weights are packed.


def test_weights_are_packed_after_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "free_memory", lambda: 2**40)
    model = lookahead_hf.enable(half())
    monkeypatch.setattr(packed_steps, "PACKED_AFTER", 2)
    steps = PackedSteps(model, "auto")
    typical, used = [], []
    for _ in range(4):
        with torch.no_grad(), steps.step():
            model(prompt())
        typical.append(steps.is_typical)
        used.append(num_products(model) > 0)
    assert typical == [True, True, False, True]
    assert used == [False, False, False, True]


def test_a_long_call_packs_in_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "free_memory", lambda: 2**40)
    steps = PackedSteps(model := half(), "auto", packed_steps.LONG_CALL)
    with torch.no_grad(), steps.step():
        model(prompt())
    assert steps.is_used and not steps.is_typical


def test_little_memory_leaves_the_weights_alone_unless_packing_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(packed_weights, "free_memory", lambda: looked.append(1) or 1000)
    model = half()
    monkeypatch.setattr(packed_steps, "PACKED_AFTER", 2)
    steps = PackedSteps(model, "auto")
    for _ in range(6):
        with torch.no_grad(), steps.step():
            model(prompt())
        assert not steps.is_used
    assert len(looked) == 2, "it is looked at again after as many steps"
    assert run(model, packed=True).execution == "packed"


def test_weights_that_cannot_be_packed_leave_the_models_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(*_: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: not enough memory")

    monkeypatch.setattr(packed_linear, "pack", no_memory)
    assert run(half(), packed=True).execution == "model"


def test_weights_whose_checks_take_long_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "checks_are_fast", lambda weight: False)
    assert run(half(), packed=True).execution == "model"


def test_the_prompt_is_run_with_packed_layers() -> None:
    model = half()
    own = run(model, packed=False)
    run_packed(model)
    steps = PackedSteps(model, True)
    before = num_products(model)
    with torch.no_grad(), steps.prefill():
        first = model(prompt()).logits[:, -1].float().tolist()
    assert num_products(model) > before
    assert first == own.logits[:1]


def test_a_compiled_layer_keeps_its_call() -> None:
    model = Joined()
    steps, _ = stepping(model)
    called: list[int] = []
    model.first._compiled_call_impl = lambda x: called.append(1) or model.first.forward(x)
    with torch.no_grad(), steps.step():
        model(torch.randn(1, 5, 64).bfloat16())
    assert called == [1] and "_compiled_call_impl" in vars(model.first)
