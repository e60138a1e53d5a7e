"""Encoder-decoder models: a decoder that counts its own positions writes plain's text too."""

from __future__ import annotations

import threading
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.call.admission import DECODERS_OF_PAIRS, ENCODER_DECODERS
from lookahead_hf.draft import DraftTree
from lookahead_hf.rows import Rows
from tests.helpers.caches import CACHE
from tests.helpers.calls import padded
from tests.helpers.compared import ALL, assert_close, compared, speculated
from tests.helpers.models import pair, prompt, tiny, unsure
from tests.helpers.scripted import Scripted, empty, right

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0}
STATES = ("decoder_hidden_states", "encoder_hidden_states")


def call(rows: int, **settings: Any) -> dict[str, Any]:
    return {**padded("right", rows), "max_new_tokens": 30, "pad_token_id": 0, **settings}


def picture_call(rows: int, **settings: Any) -> dict[str, Any]:
    pictures = torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": pictures, "max_new_tokens": 30, "pad_token_id": 0, **settings}


@pytest.mark.parametrize("name", sorted(ENCODER_DECODERS - {"florence2", "moonshine", "whisper"}))
def test_every_type_writes_plains_text(name: str) -> None:
    model = tiny(name)
    stats = compared(model, lambda: call(3, **SAMPLED), 1).stats
    assert stats.num_moved > 0
    in_lockstep = name == "blenderbot"  # its processor reads the texts of the encoder
    assert (stats.engine == "lockstep") == in_lockstep
    assert in_lockstep or len({row.row_steps for row in stats.row_stats}) > 1


@pytest.mark.parametrize(
    ("decoder", "reads", "own"),
    [
        ("bert", "bert", {}),
        ("bert-generation", "bert", {}),
        ("gpt2", "vit", {}),
        ("mbart", "vit", {}),
        ("trocr", "vit", {}),
        ("trocr", "vit", {"use_learned_position_embeddings": False}),
    ],
)
def test_a_pair_of_two_models_writes_plains_text(
    decoder: str, reads: str, own: dict[str, Any]
) -> None:
    assert decoder in DECODERS_OF_PAIRS
    given = {"decoder_input_ids": torch.tensor([[1, 7, 9, 11]] * 3), **SAMPLED, **ALL}
    make = picture_call if reads == "vit" else call
    both = compared(pair(decoder, reads, "eager", **own), lambda: make(3, **given), 4)
    assert both.stats.num_moved > 0
    for field in (*STATES, "logits"):
        assert_close(both.ours[field], both.plain[field])


@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")  # older versions
@pytest.mark.parametrize("name", ["t5", "bart", "marian", "m2m_100"])
def test_weights_that_are_elsewhere_between_forwards(name: str) -> None:
    model = tiny(name)
    accelerate.cpu_offload(model, torch.device("cpu"), offload_buffers=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    compared(model, lambda: call(3, **SAMPLED), 1)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("bart", {**SAMPLED, "max_new_tokens": 63}, id="positions to the table's end"),
        pytest.param("t5", {**GREEDY, "cache_implementation": "static"}, id="static cache by name"),
    ],
)
def test_settings(name: str, settings: dict[str, Any]) -> None:
    compared(tiny(name), lambda: {**call(2), **settings}, 1)


@pytest.mark.parametrize("name", ["t5", "bart", "m2m_100"])
def test_a_decoder_prompt_with_pads(name: str) -> None:
    given = {
        "decoder_input_ids": torch.tensor([[0, 17, 40, 8], [0, 0, 0, 9], [0, 11, 0, 6]]),
        "decoder_attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 0, 1], [0, 1, 0, 1]]),
    }
    returned = {"return_dict_in_generate": True, "output_scores": True}
    both = compared(tiny(name), lambda: call(3, **SAMPLED, **given, **returned), 4)
    assert_close(both.ours.scores, both.plain.scores)


def test_a_cache_of_the_callers_comes_back_filled() -> None:
    model = tiny("t5")
    caches: list[EncoderDecoderCache] = []

    def with_cache() -> dict[str, Any]:
        caches.append(EncoderDecoderCache(DynamicCache(), DynamicCache()))
        return call(1, **GREEDY, **{CACHE: caches[-1]})

    compared(model, with_cache, 1)
    plain, ours = caches
    assert ours.get_seq_length() == plain.get_seq_length() == 30


def test_what_the_encoder_returned_may_be_given() -> None:
    model, given = tiny("t5"), call(3, **SAMPLED)
    ids = given.pop("input_ids")
    with torch.no_grad():
        read = model.get_encoder()(ids, attention_mask=given["attention_mask"], return_dict=True)
    drafter = SeesSource([[]] * 3, empty)
    config = SpeculativeConfig(drafters=(drafter, "ngram"), budget=16)
    compared(model, lambda: {**given, "encoder_outputs": read}, 1, config=config)
    assert drafter.seen is None  # ids that stand for nothing


@pytest.mark.parametrize(
    ("name", "settings"), [("t5", GREEDY), ("bart", {**SAMPLED, "num_return_sequences": 2})]
)
def test_an_assistant_with_an_encoder(name: str, settings: dict[str, Any]) -> None:
    model = tiny(name)
    config = SpeculativeConfig(drafters=("assistant",), budget=16)
    assistant = {"assistant_model": unsure(model, 0.005)}
    stats = compared(model, lambda: call(3, **settings), 1, config=config, brought=assistant).stats
    assert stats.per_source["assistant"].accepted > 0
    if settings is GREEDY:
        assert stats.tokens_per_step > 2


def test_an_assistant_with_an_encoder_has_nothing_to_read_without_one() -> None:
    model = tiny("llama")
    plain = model.generate(prompt(), max_new_tokens=10, do_sample=False)
    with (
        lookahead_hf.enabled(model),
        pytest.warns(RuntimeWarning, match="cannot assist a decoder-only model"),
    ):
        given = {"assistant_model": tiny("t5"), "speculative": True}
        ours = model.generate(prompt(), max_new_tokens=10, do_sample=False, **given)
    assert ours.tolist() == plain.tolist()


class SeesSource(Scripted):
    """Keeps what it is shown of the encoder's texts."""

    seen: list[np.ndarray] | None = None

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        self.seen = rows.encoder_ids
        return super().propose(rows, max_nodes)


def test_drafters_see_what_the_encoder_read_without_pads() -> None:
    model, drafter = tiny("t5"), SeesSource([[]] * 4, empty)
    config = SpeculativeConfig(drafters=(drafter,), budget=16)
    with lookahead_hf.enabled(model):
        model.generate(**call(2, **SAMPLED, num_return_sequences=2), speculative=config)
    read = padded("right", 2)
    expected = [i[m.bool()].tolist() for i, m in zip(*read.values(), strict=True) for _ in range(2)]
    assert drafter.seen is not None
    assert [ids.tolist() for ids in drafter.seen] == expected


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_plain_call_of_another_thread_counts_as_before(name: str) -> None:
    model = tiny(name)
    expected = model.generate(**call(2, **GREEDY)).tolist()
    got: list[Any] = []

    def plainly() -> None:
        got.append(model.generate(**call(2, **GREEDY)).tolist())

    class Interrupts(Scripted):
        def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
            if not got:
                thread = threading.Thread(target=plainly)
                thread.start()
                thread.join()
            return super().propose(rows, max_nodes)

    drafter = Interrupts([row[1:] for row in expected], right(3))
    config = SpeculativeConfig(drafters=(drafter,), budget=16)
    with lookahead_hf.enabled(model):
        ours = model.generate(**call(2, **GREEDY), speculative=config).tolist()
    assert ours == got[0] == expected
    speculated(model)
