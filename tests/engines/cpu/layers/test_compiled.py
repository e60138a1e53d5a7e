"""Layers that compiled kernels compute: families, bits, changes to the model, threads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama import modeling_llama

import lookahead_hf
from lookahead_hf.call import execution
from lookahead_hf.engines.cpu import descriptions as known
from lookahead_hf.engines.cpu.kernels import fields
from lookahead_hf.engines.cpu.layers import CompiledLayers
from lookahead_hf.engines.cpu.step import LayerStep
from lookahead_hf.model import compat
from lookahead_hf.model.state import state_of
from tests.helpers.changes import (
    BREAKING,
    CHANGES,
    adapted,
    hidden_method,
    merged,
    moved_on,
    replaced_parameter,
    switched,
)
from tests.helpers.compiled import Bits, in_a_forward, in_threads, run
from tests.helpers.models import VOCAB, prompt, tiny
from tests.helpers.scripted import RandomTrees, continuations, scripted

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "ministral": MIXED | {"sliding_window": 7},
    "mistral": {"sliding_window": 7},
    "qwen2": {"head_dim": 10},
    "qwen3": {"layer_types": None},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": MIXED | {"sliding_window": 7, "attn_logit_softcapping": 3.0},
    "gemma3_text": MIXED | {"sliding_window": 7, "query_pre_attn_scalar": 20},
    "phi3": {"sliding_window": None, "head_dim": 10},
    "phi3 in part": {
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    },
    "olmo2": {"head_dim": 10},
    "granite": {"residual_multiplier": 0.3, "attention_multiplier": 0.2, "head_dim": 10},
    "smollm3": {"no_rope_layers": [1, 0, 1], "head_dim": 10},
    "starcoder2": {"sliding_window": None, "head_dim": 10, "use_bias": True},
}
"""Families that the kernels know, with what sets them apart."""


def of_family(name: str, dtype: torch.dtype = torch.float32, **own: Any) -> Any:
    torch.manual_seed(5)
    config = CONFIG_MAPPING[name.split()[0]](**(SHAPE | FAMILIES[name] | own))
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = None
    if name == "gemma2":  # older versions of transformers give it torch's, which has no caps
        model.set_attn_implementation("eager")
    return model.to(dtype)


def layers_of(model: Any) -> list[Any]:
    kept = state_of(model).get(CompiledLayers)
    assert kept is not None
    return kept.layers


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    counts: list[int] = []
    inner = LayerStep._run

    def counting(self: Any, layers: list[Any], *rest: Any) -> None:
        counts.append(len(layers))
        inner(self, layers, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(LayerStep, "_run", counting)
        yield counts


@pytest.mark.parametrize("name", known.FAMILIES)
def test_a_family_has_the_classes_of_its_file(name: str) -> None:
    file = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    family = known.FAMILIES[name]
    kinds = [each for each in vars(file).values() if isinstance(each, type)]
    parts = [each for each in kinds if known.family_of(each, known.PARTS) is family]
    assert len(parts) == (3 if name == "starcoder2" else 4)  # which has torch's norms
    assert any(known.family_of(each, known.MODELS) is family for each in kinds)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_family_writes_plains_text(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = of_family(name), prompt(rows, 11)
    mask = torch.ones_like(ids)
    mask[-1, :4] = 0 if rows > 1 else 1
    call = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False, "output_logits": True}
    plain = model.generate(ids, **call, return_dict_in_generate=True)
    config = scripted(continuations(plain.sequences, 11), RandomTrees())
    with lookahead_hf.enabled(model), counted(monkeypatch) as counts:
        ours = model.generate(ids, **call, return_dict_in_generate=True, speculative=config)
        stats = ours.speculative_stats
        assert stats.fallback_reason is None and stats.num_accepted > 0
        assert stats.execution == "compiled"
        assert [each.is_trusted for each in layers_of(model)] == [True] * 4  # with the output layer
        kept = state_of(model).get(CompiledLayers)
        assert kept is not None and kept.is_current()  # a call leaves the layers as they were
        steps = stats.num_steps  # the first of which tries each layer, and the others call once
        assert counts.count(3) == steps - 1 and counts.count(1) == 3 + steps
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for own, other in zip(ours.logits, plain.logits, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-3)


class OfEveryWidth:
    """Two right tokens and siblings of them: by turns 1 to so many tokens with the last one."""

    def __init__(self, widest: int, threads: int) -> None:
        self.random, self.widest, self.threads, self.count = Random(0), widest, threads, 0

    def __call__(self, rest: list[int]) -> Any:
        torch.set_num_threads(self.threads)
        self.count += 1
        num_nodes = (self.count * 7 - 7) % self.widest
        right = rest[: min(2, num_nodes)]
        others = [token for token in range(VOCAB) if token != (rest or [-1])[0]]
        siblings = self.random.sample(others, num_nodes - len(right))
        return right + siblings, [*range(-1, len(right) - 1), *[-1] * len(siblings)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "rows", "widest"),
    [("llama", 1, 64), ("llama", 3, 41), ("gemma3_text", 1, 16), ("olmo2", 1, 16)],
)
def test_bits_are_the_same_at_every_width(
    name: str, rows: int, widest: int, dtype: torch.dtype
) -> None:
    model, ids = of_family(name, dtype), prompt(rows, 11)
    mask, threads = torch.ones_like(ids), torch.get_num_threads()
    for row in range(1, rows):
        mask[row, : 3 * row] = 0
    call = {"max_new_tokens": 3 * widest, "do_sample": False, "attention_mask": mask}
    call |= {"return_dict_in_generate": True, "output_logits": True}
    with lookahead_hf.enabled(model):
        alone = model.generate(ids, **call, speculative={"budget": 0})
        truths = continuations(alone.sequences, 11)
        for count in (1, 2, 4):
            script = OfEveryWidth(widest, count)
            try:
                drafted = model.generate(ids, **call, speculative=scripted(truths, script))
            finally:
                torch.set_num_threads(threads)
            stats = drafted.speculative_stats
            assert stats.num_accepted > 0 and stats.own_code == () and stats.layers["model"] == 0
            assert rows > 1 or set(stats.budget_histogram) == set(range(widest))
            assert torch.equal(torch.cat(drafted.logits), torch.cat(alone.logits))


def test_a_layer_that_gives_other_results_runs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of transformers may change what the code of a known layer stands for."""
    model, ids = of_family("llama"), prompt(1, 11)
    monkeypatch.setitem(known.ACTIVATIONS, type(model.model.layers[0].mlp.act_fn), fields.GELU_TANH)
    plain = model.generate(ids, max_new_tokens=20, do_sample=False)
    with lookahead_hf.enabled(model):
        ours = model.generate(ids, max_new_tokens=20, do_sample=False, speculative={"budget": 3})
        assert [each.is_trusted for each in layers_of(model)] == [False] * 3 + [True]
    assert ours.tolist() == plain.tolist()


def laid(model: Any) -> list[Any]:
    return [module for module in model.modules() if compat.CALL in vars(module)]


def changed_alike(make: Callable[[], Any], change: Callable[..., None], in_mid_call: bool) -> Bits:
    """Change a model whose layers are compiled and one whose are not; return the former's bits."""
    results = []
    for compiled in (False, True):
        model = make()
        if compiled:
            assert run(model, True).execution == "compiled"
        with pytest.MonkeyPatch.context() as patch:
            given = patch if change.__code__.co_varnames[:1] == ("patch",) else model
            if in_mid_call:
                results.append(run(model, compiled, lambda given=given: change(given)))
            else:
                change(given)
                results.append(run(model, compiled))
        assert [each for each in laid(model) if each is not model.model.layers[1].mlp] == []
    own, ours = (torch.tensor(each.logits) for each in results)
    assert results[0].text == results[1].text
    torch.testing.assert_close(ours, own, rtol=1e-3, atol=1e-3)
    return results[1]


def single() -> Any:
    return tiny("llama", num_hidden_layers=4)


def halved(*args: Any, **kwargs: Any) -> Any:
    return compat.SDPA(*args, **kwargs)[0] * 0.5, None


PATCHES: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "a function of the file": (
        *(modeling_llama, "apply_rotary_pos_emb"),
        lambda own: lambda q, k, c, s, *a: own(q, k, -c, s, *a),
    ),
    "the class of linear layers": (nn.Linear, "forward", lambda own: lambda *a: own(*a) * 0.5),
    "torch's function": (nn.functional, "linear", lambda own: lambda *a: own(*a) * 0.5),
    "a wrapper that says what it wraps": (
        *(modeling_llama.LlamaMLP, "forward"),
        lambda own: wraps(own)(lambda self, x: own(self, x) * 1.5),
    ),
    "a class's call": (modeling_llama.LlamaMLP, "__call__", lambda own: lambda *a: own(*a) * 0.5),
    "the attention of the file": (
        *(nn.functional, "scaled_dot_product_attention"),
        lambda own: lambda *a, **k: own(*a, **k) * 0.5,
    ),
    "the registry of the file": (
        *(modeling_llama, "ALL_ATTENTION_FUNCTIONS"),
        lambda own: SimpleNamespace(get_interface=lambda *_: halved),
    ),
}
"""What a forward reads outside of the model: where, and what is put there in its place."""


@pytest.mark.parametrize("in_mid_call", [False, True])
@pytest.mark.parametrize(("owner", "name", "make"), PATCHES.values(), ids=PATCHES)
def test_what_a_forward_reads_counts_at_once(
    owner: Any, name: str, make: Any, in_mid_call: bool
) -> None:
    def change(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(owner, name, make(getattr(owner, name)), raising=False)

    assert changed_alike(single, change, in_mid_call).text != plain_text()


@cache
def plain_text() -> list[list[int]]:
    return run(single(), False).text


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_within_a_forward_counts_at_once(change: Any) -> None:
    changed = changed_alike(partial(adapted, single), in_a_forward(change), in_mid_call=True)
    assert changed.logits != unchanged().logits


@cache
def unchanged() -> Bits:
    return run(adapted(single), True)


def outcome(model: Any, compiled: bool, change: Callable[[], Any] | None = None) -> Any:
    try:
        return run(model, compiled, change).text
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        return type(error).__name__


def applied(change: Callable[[Any], None], model: Any) -> bool:
    """Change a model unless what an earlier change has put there lacks the attribute."""
    try:
        change(model)
    except AttributeError:
        return False
    return True


@pytest.mark.parametrize("change", BREAKING)
def test_what_breaks_a_model_in_mid_call_raises_what_its_own_code_does(change: Any) -> None:
    said = []
    for compiled in (False, True):
        model = single()
        run(model, compiled)
        with pytest.raises(RuntimeError) as raised:
            run(model, compiled, partial(change, model))
        said.append(str(raised.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("in_mid_call", [False, True])
def test_a_method_of_an_object_counts_at_once(in_mid_call: bool) -> None:
    gemma = partial(of_family, "gemma")
    before = run(gemma(), True)
    assert changed_alike(gemma, hidden_method, in_mid_call).logits != before.logits


MIXABLE = tuple(each for each in CHANGES if each not in (switched, moved_on, merged))


@pytest.mark.parametrize("seed", range(3))
def test_random_changes_count_at_once(seed: int) -> None:
    """Some of them between calls, and others in the middle of one."""
    random = Random(seed)
    rounds = [random.sample(MIXABLE, 2) for _ in range(3)]
    texts: dict[bool, list[Any]] = {False: [], True: []}
    for compiled, found in texts.items():
        model = adapted(single)
        assert run(model, compiled).execution == ("compiled" if compiled else "model")
        for between, within in rounds:
            found.append(applied(between, model))
            found.append(outcome(model, compiled))
            found.append(outcome(model, compiled, partial(within, model)))
    assert texts[True] == texts[False]
    assert texts[True][0]  # at least the first change is possible


def own_code(model: Any) -> tuple[str, ...]:
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None and stats.num_accepted > 0
    return stats.own_code


WRAPPERS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "forward": (
        modeling_llama.LlamaMLP,
        lambda own, factor: lambda self, x: own(self, x) * factor[0],
    ),
    "apply_rotary_pos_emb": (
        modeling_llama,
        lambda own, factor: lambda q, k, c, s, *a: own(q, k, c * factor[0], s, *a),
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_that_does_nothing_yet_is_not_trusted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (owner, make), factor, model = WRAPPERS[name], [1.0], single()
    own = getattr(owner, name)
    monkeypatch.setattr(owner, name, wraps(own)(make(own, factor)))
    run(model, True)
    assert not layers_of(model)
    factor[0] = 1.5
    assert run(model, True).text == run(model, False).text


class Derived(modeling_llama.LlamaDecoderLayer):
    """Does what its parent does, and might do anything."""


_OWN = modeling_llama.LlamaDecoderLayer
Copied = type(
    _OWN.__name__, _OWN.__bases__, {**vars(_OWN), "__module__": "transformers_modules.own"}
)
"""As in the code of a checkpoint."""


@pytest.mark.parametrize("kind", [Derived, Copied])
def test_a_layer_of_another_class_runs_its_own_code(kind: Any) -> None:
    model = single()
    for layer in model.model.layers[:2]:
        layer.__class__ = kind
    expected = run(model, False).text
    assert run(model, True).text == expected
    reason = f"{execution.UNKNOWN}: {kind.__name__} of {kind.__module__} is not known"
    assert own_code(model) == (reason,)
    served = [each.module for each in layers_of(model)]
    assert not {*model.model.layers[:2]}.intersection(served)
    assert set(model.model.layers[2:]) <= {*served}


def test_attention_registered_as_eager_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers prefers it to the function of the module's file."""
    model = single()
    model.set_attn_implementation("eager")
    assert run(model, True).execution == "compiled"
    before = run(model, False).text
    monkeypatch.setitem(AttentionInterface._global_mapping, "eager", halved)
    changed = run(model, False).text
    assert run(model, True).text == changed != before


def test_a_cap_that_torchs_attention_looks_past_is_not_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in transformers 5.17; newer versions raise an error."""

    def look_past(*args: Any, softcap: float | None = None, **kwargs: Any) -> Any:
        return own_attention(*args, **kwargs)

    own_attention = compat.SDPA
    # Whoever has put a function back by that name has left it here, in front of the other.
    registry = modeling_llama.ALL_ATTENTION_FUNCTIONS
    monkeypatch.delitem(registry._local_mapping, "sdpa", raising=False)
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", look_past)
    for each in (compat, compat.attention):
        monkeypatch.setattr(each, "SDPA", look_past)
    model = of_family("gemma2", attn_logit_softcapping=0.5)
    compat.set_attention_name(model.config, "sdpa")
    own, ours = run(model, False), run(model, True)
    assert own_code(model) == (execution.OTHER_ARGUMENTS,)
    torch.testing.assert_close(
        torch.tensor(ours.logits), torch.tensor(own.logits), rtol=1e-3, atol=1e-3
    )


def test_a_dropout_that_comes_on_counts() -> None:
    model = single()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert run(model, True).execution == "compiled"
    kept = state_of(model).get(CompiledLayers)
    assert kept is not None and kept.is_current()
    model.train()
    assert not kept.is_current()
    assert not CompiledLayers(model).layers


def one_bias(model: Any) -> None:
    """torch spreads it over all outputs."""
    model.model.layers[1].mlp.down_proj.bias = nn.Parameter(torch.full((1,), 0.3))


def without_a_weight(model: Any) -> None:
    """As a loader of quantised weights leaves a layer."""
    layer = model.lm_head
    weight = layer.weight.data
    del layer.weight
    layer.forward = lambda x: x @ weight.T


def sparse(model: Any) -> None:
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.data.to_sparse())


@pytest.mark.parametrize("change", [one_bias, without_a_weight, sparse])
def test_a_layer_of_an_odd_build_runs_itself(change: Any) -> None:
    model, ids = of_family("llama"), prompt(1, 11)
    change(model)
    plain = model.generate(ids, max_new_tokens=20, do_sample=False)
    config = scripted(continuations(plain, 11), RandomTrees())
    with lookahead_hf.enabled(model):
        ours = model.generate(ids, max_new_tokens=20, do_sample=False, speculative=config)
        stats = lookahead_hf.last_stats(model)
        assert stats is not None and stats.fallback_reason is None and stats.num_accepted > 0
        described = {each.module for each in layers_of(model)}
    assert ours.tolist() == plain.tolist()
    own = (model.lm_head,) if change is without_a_weight else (model.model.layers[1],)
    assert described and not described.intersection(own)


def another(name: str, model: Any) -> None:
    model.set_submodule(name, copy.deepcopy(model.get_submodule(name)))


@pytest.mark.parametrize(
    "change",
    [replaced_parameter, *(partial(another, name) for name in ("model.layers.1", "lm_head"))],
)
def test_a_model_that_was_changed_is_described_anew(change: Any) -> None:
    model = single()
    run(model, True)
    run(model, True, lambda: change(model))
    assert lookahead_hf.last_stats(model).own_code == (execution.CHANGED,)
    run(model, True)
    assert lookahead_hf.last_stats(model).layers == {"compiled": 5, "model": 0}


def test_a_layer_that_is_there_twice_runs_itself() -> None:
    model = single()
    model.model.layers[2] = model.model.layers[1]
    assert CompiledLayers(model).refused == {
        f"{execution.UNKNOWN}: several layers share a layer of the cache"
    }


def test_calls_in_threads_write_their_texts() -> None:
    model = lookahead_hf.enable(single())
    texts = [prompt(1, 9 + at) for at in range(4)]
    call = {"max_new_tokens": 40, "do_sample": False}
    expected = [[model.generate(ids, **call).tolist()] * 3 for ids in texts]

    def written(ids: torch.Tensor) -> list[Any]:
        given = {**call, "speculative": {"budget": 5}}
        return [model.generate(ids, **given).tolist() for _ in range(3)]

    assert in_threads(*(partial(written, ids) for ids in texts)) == expected
    assert laid(model) == []


def test_linear_layers_of_other_models_are_computed_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lookahead_hf.engines.cpu.layers.LEAST_WEIGHT", 1)
    model, ids = tiny("gpt_neox", num_hidden_layers=4), prompt(2, 11)
    plain = model.generate(ids, max_new_tokens=20, do_sample=False)
    config = scripted(continuations(plain, 11), RandomTrees())
    with lookahead_hf.enabled(model):
        ours = model.generate(ids, max_new_tokens=20, do_sample=False, speculative=config)
        stats = lookahead_hf.last_stats(model)
        assert stats is not None and stats.num_accepted > 0 and stats.execution == "compiled"
        assert stats.layers == {"compiled": 17, "model": 0} and len(stats.own_code) == 1
        assert stats.own_code[0].startswith(execution.UNKNOWN)  # attention and norms are its own
        assert len(layers_of(model)) == 17 and all(each.is_trusted for each in layers_of(model))
    assert ours.tolist() == plain.tolist()


def test_hooks_that_transformers_has_left_act_only_where_outputs_are_collected() -> None:
    """They come with the first call that asks for hidden states, and stay."""
    model = lookahead_hf.enable(tiny("llama"))
    call = {"max_new_tokens": 12, "do_sample": False, "speculative": {"budget": 4}}
    collected = {"return_dict_in_generate": True, "output_hidden_states": True}
    for extra, reasons in ((collected, (execution.HOOKS,)), ({}, ())):
        model.generate(prompt(), **call, **extra)
        stats = lookahead_hf.last_stats(model)
        assert stats is not None and stats.fallback_reason is None and stats.num_accepted > 0
        assert stats.own_code == reasons


def wrapped(model: Any) -> Callable[[], None]:
    mlp = model.model.layers[1].mlp
    own = mlp.down_proj
    mlp.down_proj = nn.Sequential(own)
    return lambda: setattr(mlp, "down_proj", own)


def in_other_numbers(model: Any) -> Callable[[], None]:
    model.double()
    return model.float


def in_pieces(model: Any) -> Callable[[], None]:
    weight = model.model.layers[1].mlp.down_proj.weight
    own = weight.data
    weight.data = own.t().contiguous().t()
    return lambda: setattr(weight, "data", own)


@pytest.mark.parametrize("change", [wrapped, in_other_numbers, in_pieces])
def test_an_unknown_layer_is_described_once_it_is_known(change: Any) -> None:
    model = single()
    undo = change(model)
    layers = CompiledLayers(model)
    assert layers.num_refused and layers.is_current()
    undo()
    assert not layers.is_current()
    assert not CompiledLayers(model).num_refused
