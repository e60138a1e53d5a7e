"""Steps leave torch's bookkeeping for gradients out where no code of the user's runs in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

import lookahead_hf
from lookahead_hf.runner.below_autograd import BelowAutograd
from tests.helpers.models import prompt, tiny
from tests.helpers.packing import Bits, Once, pack_all, run

KEY = torch._C.DispatchKey.ADInplaceOrView


class Rotations:
    """Stands in for a function that all layers call: notes where it runs, and may do more."""

    def __init__(self) -> None:
        self.original = modeling_llama.apply_rotary_pos_emb
        self.are_below: list[bool] = []
        self.change: Callable[[], Any] = lambda: None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.are_below.append(torch._C._dispatch_tls_is_dispatch_key_excluded(KEY))
        self.change()
        return self.original(*args, **kwargs)


@pytest.fixture
def rotations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rotations]:
    stand_in = Rotations()
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", stand_in)
    yield stand_in
    assert not torch._C._dispatch_tls_is_dispatch_key_excluded(KEY)


def generate(model: Any, **kwargs: Any) -> Any:
    """Write a text by steps with drafts that are accepted."""
    call = {"max_new_tokens": 40, "do_sample": False, **kwargs}
    with lookahead_hf.enabled(model):
        output = model.generate(prompt(), **call, speculative={"budget": 5})
        stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None and stats.num_accepted > 0
    return output


def test_only_steps_leave_the_bookkeeping_out(rotations: Rotations) -> None:
    model = tiny("llama")
    plain = model.generate(prompt(), max_new_tokens=40, do_sample=False)
    num_layers = model.config.num_hidden_layers
    rotations.are_below.clear()
    assert torch.equal(generate(model), plain)
    assert rotations.are_below[:num_layers] == [False] * num_layers  # the prompt
    assert all(rotations.are_below[num_layers:]) and len(rotations.are_below) > num_layers


def test_what_a_call_returns_can_be_trained_with_and_written_to() -> None:
    model = tiny("llama")
    output = generate(model, return_dict_in_generate=True, output_logits=True)
    for logits in output.logits:
        logits += 1
    for layer in output.past_key_values.layers:
        layer.keys += 1
    last = output.sequences[:, -1:]
    model(last, past_key_values=output.past_key_values).logits.sum().backward()
    assert model.lm_head.weight.grad is not None


def hooked(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda *_: None)


def pre_hooked(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(lambda *_: None)


def replaced_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = mlp.forward


class OwnMLP(modeling_llama.LlamaMLP):
    pass


def other_class(model: Any) -> None:
    model.model.layers[0].mlp.__class__ = OwnMLP


def other_module(model: Any) -> None:
    layer = model.model.layers[0]
    mlp = OwnMLP(model.config)
    mlp.load_state_dict(layer.mlp.state_dict())
    layer.mlp = mlp


def other_weight(model: Any) -> None:
    class Weight(nn.Parameter):
        pass

    model.lm_head.weight = Weight(model.lm_head.weight.detach())


CHANGES = hooked, pre_hooked, replaced_forward, other_class, other_module, other_weight


@pytest.mark.parametrize("change", CHANGES)
def test_code_of_unknown_origin_keeps_it(
    change: Callable[[Any], None], rotations: Rotations
) -> None:
    model = tiny("llama")
    change(model)
    generate(model)
    assert not any(rotations.are_below)


def by_gradient(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor as the gradient of half its square."""
    with torch.enable_grad():
        leaf = x.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(leaf.square().sum() / 2, leaf)
    return gradient


def on_inputs(function: Any) -> Any:
    """Wrap a function so that gradients are computed in it; its second argument is a tensor."""

    @wraps(function)
    def wrapped(first: Any, second: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(first, by_gradient(second), *args, **kwargs)

    return wrapped


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (modeling_llama.LlamaMLP, "forward"),
        (modeling_llama.LlamaMLP, "__call__"),
        (modeling_llama, "apply_rotary_pos_emb"),
        (None, "sdpa"),
    ],
)
def test_patched_code_may_compute_gradients(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    plain = model.generate(prompt(), max_new_tokens=40, do_sample=False)
    if owner is None:
        AttentionInterface.register(name, on_inputs(sdpa_attention_forward))
    else:
        monkeypatch.setattr(owner, name, on_inputs(getattr(owner, name)))
    try:
        assert torch.equal(generate(model), plain)
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


@pytest.mark.parametrize("change", CHANGES[:3])
def test_a_change_in_mid_call_counts_from_the_next_step_on(
    change: Callable[[Any], None], rotations: Rotations
) -> None:
    model = tiny("llama")
    once = Once(lambda: (change(model), rotations.are_below.append(False)))
    generate(model, logits_processor=[once])
    since = len(rotations.are_below) - rotations.are_below[::-1].index(True)
    assert once.is_done and any(rotations.are_below)
    assert since < len(rotations.are_below) - model.config.num_hidden_layers


def test_hooks_that_only_collect_outputs_change_nothing(rotations: Rotations) -> None:
    model = tiny("llama")
    model(prompt(), output_hidden_states=True)
    rotations.are_below.clear()
    generate(model)
    assert any(rotations.are_below)


def test_gradients_that_are_on_stay_on() -> None:
    modules = [nn.Linear(2, 2)]
    with BelowAutograd(modules).step():
        assert modules[0](torch.ones(2)).requires_grad
    with torch.no_grad(), BelowAutograd(modules).step():
        assert torch._C._dispatch_tls_is_dispatch_key_excluded(KEY)


@pytest.mark.parametrize("packed", [False, True])
def test_a_write_to_the_input_of_joined_layers_counts(
    packed: bool, rotations: Rotations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody counts writes there, but a layer that is hooked in mid forward drops the product."""
    pack_all(monkeypatch)

    def text_and_bits(model: Any, is_packed: bool) -> Bits:
        def hook_a_layer() -> None:
            rotations.change = lambda: None
            layer = model.model.layers[2].self_attn.k_proj
            layer.register_forward_pre_hook(lambda _, args: (args[0].mul_(2),))

        return run(model, is_packed, lambda: setattr(rotations, "change", hook_a_layer))

    own = text_and_bits(tiny("llama").bfloat16(), False)
    ours = text_and_bits(tiny("llama").bfloat16(), packed)
    assert (ours.text, ours.logits) == (own.text, own.logits)
    assert bool(ours.num_products) == packed and any(rotations.are_below)
