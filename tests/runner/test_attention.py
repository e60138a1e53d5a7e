"""Our attention: whose function it replaces, what it leaves behind, and when a kernel attends."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead_hf import kernels
from lookahead_hf.block.block import kernel_serves
from lookahead_hf.runner import attention
from tests.helpers.caches import CACHE
from tests.helpers.calls import compare, padded
from tests.helpers.compared import compared, left_to_plain
from tests.helpers.compiled import Once
from tests.helpers.models import prompt, tiny

GREEDY = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}


def mixed(out: torch.Tensor) -> torch.Tensor:
    return out + out.roll(1, -1)


class Own:
    """Attention of a caller, which counts its calls and looks at the mask as plain makes it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
    ) -> Any:
        self.calls += 1
        assert attention_mask is None or attention_mask.dtype == torch.bool
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return mixed(out), None


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("where", ["registered", "patched", "registered before"])
def test_a_function_in_the_place_of_sdpa_is_called(
    where: str, name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is put there after a call; the next one without it is as before."""
    model, inputs = tiny(name), padded("left", rows)
    if where != "registered before":
        compare(model, inputs, **GREEDY)
    before = model.generate(**inputs, **GREEDY)
    own, calls = Own(), [0]
    with monkeypatch.context() as patch:
        if where == "patched":
            stock = torch.nn.functional.scaled_dot_product_attention

            def patched(*args: Any, **kwargs: Any) -> torch.Tensor:
                calls[0] += 1
                return mixed(stock(*args, **kwargs))

            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", patched)
        else:
            patch.setitem(AttentionInterface._global_mapping, "sdpa", own)
        assert model.generate(**inputs, **GREEDY).tolist() != before.tolist()
        in_plain = own.calls + calls[0]
        stats = compare(model, inputs, **GREEDY)
        assert own.calls + calls[0] >= 2 * in_plain + stats.num_steps
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    compare(model, inputs, **GREEDY)


def test_masks_of_a_caller_are_left_to_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = AttentionMaskInterface._global_mapping["sdpa"]
    monkeypatch.setitem(
        AttentionMaskInterface._global_mapping, "sdpa", lambda *args, **kw: stock(*args, **kw)
    )
    call = {"input_ids": prompt(), **GREEDY}
    left_to_plain(tiny("llama"), lambda: dict(call), r"mask function.*attention")


@pytest.mark.parametrize("seed", [2, 3])
def test_a_model_may_compare_the_name_of_its_attention(seed: int) -> None:
    """gemma4 reads prompts in another way by "sdpa" than by other names, with a static cache."""
    model = tiny("gemma4")

    def call() -> dict[str, Any]:
        cache = StaticCache(config=model.config.get_text_config(), max_cache_len=40)
        return {"input_ids": prompt(2, 12, seed=seed), **GREEDY, CACHE: cache}

    compared(model, call, 12)


def test_a_copy_made_within_a_call_has_the_models_own_attention() -> None:
    model = tiny("llama")
    copies: list[Any] = []

    def copy_model() -> None:
        if type(model.config._attn_implementation) is not str:  # ours
            copies.extend([copy.deepcopy(model), pickle.loads(pickle.dumps(model))])

    plain, *_ = compared(
        model, lambda: {"input_ids": prompt(), **GREEDY, "logits_processor": [Once(copy_model)]}, 12
    )
    assert len(copies) == 2
    for each in copies:
        assert each.config._attn_implementation == "sdpa"
        assert type(each.config._attn_implementation) is str
        assert each.generate(prompt(), **GREEDY).tolist() == plain.tolist()


def layer(rows: int, heads: int, kv_heads: int, width: int, slots: int, dim: int) -> tuple:
    made = (rows, heads, width, dim), (rows, kv_heads, slots, dim), (rows, kv_heads, slots, dim)
    return tuple(torch.empty(shape, device="meta") for shape in made)


def test_the_kernel_attends_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long contexts, and shorter ones whose programs would leave processors of the GPU idle."""
    monkeypatch.delenv("LOOKAHEAD_HF_BACKEND", raising=False)
    monkeypatch.setattr(attention, "_processors", lambda _: 132)
    assert attention.kernel_is_faster(*layer(1, 28, 4, 64, 512, 128))
    assert attention.kernel_is_faster(*layer(64, 28, 4, 8, 1024, 128))
    assert not attention.kernel_is_faster(*layer(1, 28, 4, 64, 256, 128))
    assert not attention.kernel_is_faster(*layer(8, 28, 4, 64, 512, 128))
    assert not attention.kernel_is_faster(*layer(1, 4, 1, 8, 2048, 512))
    monkeypatch.setenv("LOOKAHEAD_HF_BACKEND", "triton")
    assert attention.kernel_is_faster(*layer(8, 28, 4, 64, 256, 128))


def test_no_kernel_attends_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOOKAHEAD_HF_BACKEND", raising=False)
    monkeypatch.setattr(kernels, "_has_triton", lambda device: True)
    assert not kernel_serves(torch.device("cpu"), 8)
    assert kernel_serves(torch.device("cuda"), 64)
    assert not kernel_serves(torch.device("cuda"), 65)
