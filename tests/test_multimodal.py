"""Models that read pictures or hear sound: plain's text and logits, also where they read more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import lookahead_hf
from lookahead_hf.fallback import FallbackReason
from tests.helpers import multimodal
from tests.helpers.caches import CACHE
from tests.helpers.compared import assert_same_logits, compared, reason_of, speculated
from tests.helpers.scripted import RandomTrees, scripted

QUICK = ("exaone4_5", "florence2", "mllama", "paligemma", "qwen2_5_vl", "qwen2_audio")
"""They count pads, look positions up, mask pictures, count from 1, take positions of three kinds,
hear."""

FAMILIES = (
    *("aya_vision", "blip-2", "deepseek_vl", "gemma3", "gemma4", "glm4v", "got_ocr2"),
    *("hunyuan_vl", "hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "llava"),
    *("llava_next", "llava_onevision", "mistral3", "ovis2", "paddleocr_vl", "qwen2_vl"),
    *("qwen3_vl", "qwen3_vl_moe", "smolvlm", "video_llama_3", "voxtral"),
)
WITHOUT_TURNS = ("blip-2", "florence2", "mllama", "qwen2_audio")
"""They need a picture or a recording in every turn, or keep nothing from turn to turn."""

NEW = 20


def families(but: tuple[str, ...] = ()) -> list[Any]:
    """All families; most of them are slow ones, being many."""
    quick, slow = (sorted(set(names) - set(but)) for names in (QUICK, FAMILIES))
    return [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


@pytest.mark.parametrize(
    ("pictures", "words", "settings"),
    [
        pytest.param((1,), (9,), {}, id="one row"),
        pytest.param((2, 1), (8, 12), {}, id="two pictures beside one"),
        pytest.param((1, 1), (12, 7), {"do_sample": True, "temperature": 0.8}, id="sampled"),
    ],
)
@pytest.mark.parametrize("model_type", families())
@pytest.mark.filterwarnings("ignore")
def test_a_family_writes_plains_text(
    model_type: str, pictures: tuple[int, ...], words: tuple[int, ...], settings: dict[str, Any]
) -> None:
    model = multimodal.build(model_type)
    asked = {"max_new_tokens": NEW, "do_sample": False, **settings}
    asked |= {"return_dict_in_generate": True, "output_logits": True}

    def call(seed: int = 0) -> dict[str, Any]:
        return {**multimodal.call(model, pictures, words, seed), **asked}

    found = compared(model, call, -NEW)
    assert_same_logits(found)
    assert min(row.num_accepted for row in found.stats.row_stats) > 0
    assert found.stats.num_moved > 0
    if len(pictures) > 1:  # what is seen or heard changes the text
        texts = [found.plain.sequences.tolist()]
        for seed in (1, 2):
            torch.manual_seed(7)
            texts.append(model.generate(**call(seed)).sequences.tolist())
        assert texts[1:] != texts[:1] * 2


def turns(model: Any, plain: list[Any] | None = None) -> list[Any]:
    """Hold a conversation on one cache: words, then a picture, then words; return all outputs.

    Args:
        model: Who is asked.
        plain: What plain `generate` returned; calls are speculated from it.
    """
    cache, outputs = DynamicCache(config=model.config), []
    text: dict[str, torch.Tensor] = {}
    for turn, has_picture in enumerate((False, True, False)):
        new = multimodal.call(model, (1,), (7,), text_seed=turn)
        kinds = [name for name in new if name.endswith("token_type_ids")]
        if not has_picture:
            is_word = new["input_ids"][0] != multimodal.PICTURE
            new = {name: new[name][:, is_word] for name in ("input_ids", *kinds)}
        for name in ("input_ids", *kinds):
            new[name] = torch.cat([text[name], new[name]], 1) if text else new[name]
        new["attention_mask"] = torch.ones_like(new["input_ids"])
        settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
        settings |= {"return_dict_in_generate": True, "output_logits": True}
        if plain is not None:
            truth = plain[turn].sequences[0, -NEW:].tolist()
            settings["speculative"] = scripted([truth], RandomTrees())
        outputs.append(model.generate(**new, **settings, **{CACHE: cache}))
        if plain is not None:
            speculated(model)
        text = {name: torch.nn.functional.pad(new[name], (0, NEW)) for name in kinds}
        text["input_ids"] = outputs[-1].sequences
    return outputs


@pytest.mark.parametrize("model_type", families(but=WITHOUT_TURNS))
@pytest.mark.filterwarnings("ignore")
def test_a_picture_in_a_later_turn(model_type: str) -> None:
    model = multimodal.build(model_type)
    plain = turns(model)
    with lookahead_hf.enabled(model):
        ours = turns(model, plain)
    for expected, got in zip(plain, ours, strict=True):
        assert got.sequences.tolist() == expected.sequences.tolist()
        assert_same_logits((expected, got))


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_picture_without_its_mask_is_read_plainly(is_later: bool) -> None:
    """Blocks of several tokens would attend to it causally, single tokens attend to all of it."""
    model = multimodal.build("mllama")
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    settings |= {"return_dict_in_generate": True}

    def text() -> list[list[int]]:
        call = multimodal.call(model)
        if is_later:
            earlier = model.generate(**call, **settings, speculative=False)
            call = {CACHE: earlier[CACHE]}
            call["input_ids"] = torch.cat([earlier.sequences, earlier.sequences[:, 1:4]], 1)
        else:
            del call["cross_attention_mask"]
        return model.generate(**call, **settings).sequences.tolist()

    with lookahead_hf.enabled(model):
        plain = text()
        lookahead_hf.set_default(model, True)
        assert text() == plain
        assert reason_of(model) is FallbackReason.ARGUMENT
