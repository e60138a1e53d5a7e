"""`generate` with and without the hook: on one object, on a class, on every model; copies of it."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin, LlamaForCausalLM

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.hook import BATCH_METHODS, Hook
from lookahead_hf.ngram_pool import NgramPool
from tests.helpers.calls import run
from tests.helpers.fakes import PlainDecoding
from tests.helpers.models import prompt, tiny

STOCK = GenerationMixin.generate


@pytest.fixture
def everywhere() -> Any:
    lookahead_hf.enable_everywhere()
    yield
    lookahead_hf.disable_everywhere()


def own_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A wrapper such as libraries bind on a model object."""
    return type(self).generate(self, *args, **kwargs)


def test_enabled_model_decodes_by_us_and_disable_leaves_no_trace(
    model: Any, decoding: PlainDecoding
) -> None:
    expected = run(model)  # first, since transformers resolves annotations in its first call
    before = [dict(vars(each)) for each in (model, GenerationMixin, GenerationConfig)]
    with pytest.raises(ValueError, match="speculative"):
        run(model, speculative=True)
    assert lookahead_hf.enable(model) is lookahead_hf.enable(model) is model  # twice is once
    assert torch.equal(run(model, speculative=True), expected)
    assert len(decoding.calls) == 1
    assert set(vars(model)) == {*before[0], "generate", *BATCH_METHODS}
    lookahead_hf.disable(model)
    assert [dict(vars(each)) for each in (model, GenerationMixin, GenerationConfig)] == before
    lookahead_hf.disable(model)


def test_what_is_bound_is_wrapped_and_put_back(model: Any, decoding: PlainDecoding) -> None:
    bound: Any = MethodType(own_generate, model)
    vars(model)["generate"] = bound
    call = {"inputs": prompt(), "max_new_tokens": 6}
    expected = model.generate(**call)
    lookahead_hf.enable(model)
    assert torch.equal(model.generate(**call), expected)
    assert torch.equal(model.generate(**call, speculative=True), expected)
    assert len(decoding.calls) == 1
    lookahead_hf.disable(model)
    assert vars(model)["generate"] is bound


def test_enabled_restores_what_it_found(model: Any) -> None:
    with lookahead_hf.enabled(model) as same:
        assert same is model
        hook = vars(model)["generate"]
        with lookahead_hf.enabled(model):
            assert vars(model)["generate"] is hook
            lookahead_hf.enable(model, default=True)
            lookahead_hf.disable(model)
        assert vars(model)["generate"] is hook
        assert hook.default is None
    assert "generate" not in vars(model)
    with pytest.raises(KeyError), lookahead_hf.enabled(model):
        raise KeyError
    assert "generate" not in vars(model)


@pytest.mark.parametrize("everywhere", [False, True], ids=["one", "everywhere"])
def test_a_default_speculates_without_an_argument(
    model: Any, decoding: PlainDecoding, everywhere: bool, request: pytest.FixtureRequest
) -> None:
    def enable(default: Any = None) -> None:
        if everywhere:
            lookahead_hf.enable_everywhere(default)
        else:
            lookahead_hf.enable(model, default)

    request.addfinalizer(lookahead_hf.disable_everywhere)
    expected = run(model)
    enable(True)
    enable()  # as a library does later, which leaves the default alone
    assert torch.equal(run(model), expected)
    assert len(decoding.calls) == 1
    if not everywhere:
        run(copy.deepcopy(model))
        assert decoding.calls.pop().model is not model
    run(model, speculative=False)
    with pytest.warns(lookahead_hf.SpeculationFallbackWarning, match="prompt_lookup_num_tokens=3"):
        assert torch.equal(run(model, prompt_lookup_num_tokens=3), expected)
    with pytest.raises(ValueError, match="both choose how to decode"):
        run(model, prompt_lookup_num_tokens=3, speculative=True)
    assert len(decoding.calls) == 1
    enable({"max_draft_nodes": 5})
    run(model)
    assert decoding.calls[1].request.config.max_draft_nodes == 5
    with pytest.raises(ValueError, match="known: default, prompt_lookup"):
        enable("fast")
    enable(False)
    run(model)
    assert len(decoding.calls) == 2


def test_signature_and_name_pass_through(model: Any, everywhere: None) -> None:
    assert inspect.signature(GenerationMixin.generate) == inspect.signature(STOCK)
    expected = inspect.signature(MethodType(STOCK, model))
    lookahead_hf.enable(model)
    assert inspect.signature(model.generate) == expected
    assert model.generate.__name__ == "generate"
    assert inspect.signature(lookahead_hf.SpeculativeMixin.generate) == inspect.signature(STOCK)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_has_a_hook_of_its_own(model: Any, decoding: PlainDecoding, how: str) -> None:
    vars(model)["generate"] = MethodType(own_generate, model)
    lookahead_hf.enable(model)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, buffer := io.BytesIO())
        other = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert isinstance(vars(other)["generate"], Hook)
    run(other, speculative=True)
    assert decoding.calls[0].model is other
    lookahead_hf.disable(other)
    assert vars(other)["generate"] == MethodType(own_generate, other)
    assert isinstance(vars(model)["generate"], Hook)


def test_a_default_with_objects_is_shared_by_copies_and_not_stored(model: Any) -> None:
    default = SpeculativeConfig(pool=NgramPool())
    lookahead_hf.enable(model, default=default)
    assert vars(copy.deepcopy(model))["generate"].default.pool is default.pool
    assert vars(pickle.loads(pickle.dumps(model)))["generate"].default is None


def test_everywhere_reaches_every_model_and_goes(
    model: Any, decoding: PlainDecoding, everywhere: None
) -> None:
    expected = run(model)
    lookahead_hf.enable_everywhere()
    run(tiny("gpt2"), speculative=True)
    lookahead_hf.enable(model)  # the hooks on class and object step aside for each other
    assert torch.equal(run(model, speculative=True), expected)
    assert len(decoding.calls) == 2
    lookahead_hf.set_default(model, True)
    assert torch.equal(run(model, speculative=False), expected)
    assert torch.equal(run(model), expected)
    with pytest.warns(lookahead_hf.SpeculationFallbackWarning):
        run(model, num_beams=2)
    assert len(decoding.calls) == 3
    lookahead_hf.disable(model)
    for _ in range(2):
        lookahead_hf.disable_everywhere()
        assert GenerationMixin.generate is STOCK
    with pytest.raises(ValueError, match="speculative"):
        run(tiny("gpt2"), speculative=True)


def test_mixin_is_the_strategy(decoding: PlainDecoding) -> None:
    class Mine(lookahead_hf.SpeculativeMixin, LlamaForCausalLM):
        pass

    plain = tiny("llama")
    model = Mine(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    model.generation_config = plain.generation_config
    assert Mine.can_generate()
    assert torch.equal(run(model, speculative=True), run(plain))
    assert len(decoding.calls) == 1
    lookahead_hf.enable(model)
    run(model, speculative=True)
    assert len(decoding.calls) == 2


def test_functional_form_patches_nothing(model: Any, decoding: PlainDecoding) -> None:
    before, expected = dict(vars(model)), run(model)
    ids, arguments = prompt(), {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(lookahead_hf.generate(model, ids, **arguments), expected)
    assert len(decoding.calls) == 1
    lookahead_hf.generate(model, ids, **arguments, speculative=False)
    lookahead_hf.set_default(model, False)
    lookahead_hf.generate(model, ids, **arguments)
    assert len(decoding.calls) == 1
    assert vars(model) == before
    assert GenerationMixin.generate is STOCK
    lookahead_hf.set_default(model, None)
    lookahead_hf.enable(model)
    lookahead_hf.generate(model, ids, **arguments)
    assert len(decoding.calls) == 2
    with pytest.warns(lookahead_hf.SpeculationFallbackWarning):
        lookahead_hf.generate(model, ids, **arguments, num_beams=2)
    assert len(decoding.calls) == 2


@pytest.mark.parametrize(
    "value", [True, "prompt_lookup", lookahead_hf.SpeculativeConfig(max_draft_nodes=8)]
)
def test_default_is_kept_by_save_pretrained(
    model: Any, decoding: PlainDecoding, tmp_path: Path, value: Any
) -> None:
    model.generation_config._from_model_config = True
    lookahead_hf.set_default(model, value)
    model.save_pretrained(tmp_path)
    loaded = lookahead_hf.enable(AutoModelForCausalLM.from_pretrained(tmp_path))
    run(loaded)
    resolve = lookahead_hf.SpeculativeConfig.resolve
    assert [call.request.config for call in decoding.calls] == [resolve(value)]
    lookahead_hf.set_default(loaded, None)
    assert not hasattr(loaded.generation_config, "speculative")
    run(loaded)
    assert len(decoding.calls) == 1


@pytest.mark.parametrize("value", [True, None])
def test_a_default_needs_a_generation_config(model: Any, value: Any) -> None:
    model.generation_config = None
    with pytest.raises(ValueError, match=r"set model\.generation_config = .*GenerationConfig\(\)"):
        lookahead_hf.set_default(model, value)
