"""Every architecture writes plain's text, on the host and in captured steps, or falls back."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf.runner.cuda import graphs
from tests.helpers.architectures import MODEL_TYPES, build
from tests.helpers.compared import compared, speculated
from tests.helpers.device import taped
from tests.helpers.models import prompt
from tests.helpers.outputs import assert_close
from tests.helpers.scripted import RandomTrees, continuations, scripted


def words(text: str) -> list[str]:
    return text.split()


QUICK = ("falcon", "gemma2", "git", "jetmoe", "roberta")
"""Types that the quick tests include, each for another reason."""

NOT_BUILT = words(
    """
    blt dots3_note gemma3n gemma4_assistant gemma4_unified_assistant musicgen musicgen_melody
    qwen4_exp qwen4_exp_text
    """
)
"""Types of which `tests.helpers.architectures` builds no model that generates."""

STATEFUL = words("deepseek_v4 inkling2_text inkling_text recurrent_gemma rwkv xlstm")

RECURRENT = words(
    """
    bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe
    lfm3 mamba mamba2 nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
    qwen3_next zamba zamba2 zaya
    """
)
"""Types whose drafts are chains, run by the host."""

UNSERVED = words(
    """
    cpmant git minimax openai-gpt prophetnet reformer roformer xlm xlnet
    """
)
"""Types that have layers of other kinds, take no `past_key_values` (OpenAI's GPT, Reformer, XLM,
XLNet), relate tokens by their columns (CPM-Ant, RoFormer), take one token at a time (ProphetNet),
misplace the mask of pads (GIT), or keep a state of another kind (MiniMax)."""

COUNTED = words(
    """
    bart bigbird_pegasus blenderbot blenderbot-small bloom gpt_neo marian mbart
    moss_transcribe_diarize mpt mvp pegasus plbart trocr whisper
    """
)
"""Types whose steps need the columns of their tokens, so that they run on the host."""

NOT_CAPTURED = ("dbrx", "jetmoe", "longcat_flash")
"""Types that route tokens to their experts on the host."""


TOLD = ("bart", "bloom", "gpt_neo", "moss_transcribe_diarize", "mpt", "trocr", "whisper")
"""Some of them: each counts in another way."""

OWN_WAYS = ("deepseek_v32", "doge", "glm_moe_dsa", "gpt_neox_japanese", "mllama", "moshi")
"""Types with sparse attention, a mask for each head, views of K and V, layers that attend to
pictures, or a cache that drops what the mask allows."""


def expected_fallback(model_type: str) -> str | None:
    """Return the reason for which calls of a type run plain `generate`, None if they do not."""
    if model_type in STATEFUL:
        return "stateful"
    return "model" if model_type in UNSERVED else None


def generated(model: Any, call: dict[str, Any], plain: torch.Tensor) -> Any:
    """Assert that speculation writes plain's text; return its statistics."""
    trees = scripted(continuations(plain, call["inputs"].shape[1]), RandomTrees())
    config = replace(trees, cuda_graphs=True, on_fallback="silent")
    with lookahead_hf.enabled(model):
        ours = model.generate(**call, speculative=config)
    assert ours.tolist() == plain.tolist()
    return lookahead_hf.last_stats(model)


@pytest.mark.parametrize(
    "model_type",
    [t if t in QUICK else pytest.param(t, marks=pytest.mark.slow) for t in MODEL_TYPES],
)
@pytest.mark.filterwarnings("ignore")
def test_an_architecture_writes_plains_text(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(model_type)
    ids = prompt(2, 10, seed=3)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    call = {"inputs": ids, "attention_mask": mask, "do_sample": False, "pad_token_id": 0}
    call["max_new_tokens"] = 24
    if model_type in NOT_BUILT:
        with pytest.raises((AttributeError, ValueError)):
            model.generate(**call)
        return
    plain = model.generate(**call)
    monkeypatch.setattr(graphs, "WIDTHS", (32, 1))
    for engine in ("walk", "device"):
        with taped(monkeypatch) if engine == "device" else nullcontext():
            stats = generated(model, call, plain)
        assert stats.fallback_reason == expected_fallback(model_type)
        if stats.fallback_reason is None:
            assert min(row.num_accepted for row in stats.row_stats) > 0
            if model_type in RECURRENT:
                assert stats.max_width == 1
                continue
            assert stats.engine == engine or model_type in COUNTED
            assert stats.num_moved > 0
    if model_type in RECURRENT:
        return
    if model_type in NOT_CAPTURED:
        assert "waits for the device" in stats.execution
    elif stats.fallback_reason is None and model_type not in COUNTED:
        assert stats.execution == "replayed"


def ragged(**settings: Any) -> dict[str, Any]:
    """A sampled call of three rows with pads before and inside their prompts."""
    ids = prompt(3, 10, seed=3)
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[2, 0] = mask[2, 3] = 0
    sampled = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "max_new_tokens": 24}
    return {"inputs": ids, "attention_mask": mask, **sampled, **settings}


@pytest.mark.parametrize("model_type", [*TOLD, *OWN_WAYS])
@pytest.mark.filterwarnings("ignore")
def test_logits_are_plains(model_type: str) -> None:
    """Texts alone are a weak test: a wrong bias seldom changes a token of a tiny model."""
    shown = {"return_dict_in_generate": True, "output_logits": True}
    both = compared(build(model_type), lambda: ragged(**shown), 10)
    assert_close(both.ours.logits, both.plain.logits, atol=1e-4, rtol=1e-4)
    assert len({row.row_steps for row in both.stats.row_stats}) > 1 and both.stats.num_moved > 0


@pytest.mark.parametrize("model_type", ["bloom", "gpt_neo", "mpt"])
@pytest.mark.filterwarnings("ignore")
def test_what_was_told_is_taken_back(model_type: str) -> None:
    model = build(model_type)
    before = {id(module): dict(vars(module)) for module in model.modules()}
    compared(model, ragged, 10)
    for module in model.modules():
        assert vars(module).keys() == before[id(module)].keys()


@pytest.mark.parametrize("model_type", ["bart", "bloom"])
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_counts_assists(model_type: str) -> None:
    model = build(model_type)
    plain = model.generate(**ragged(do_sample=False))
    config = lookahead_hf.SpeculativeConfig(drafters=("assistant",), budget=8)
    with lookahead_hf.enabled(model):
        call = ragged(do_sample=False, assistant_model=build(model_type), speculative=config)
        assert model.generate(**call).tolist() == plain.tolist()
    assert speculated(model).tokens_per_step > 2
