"""Models with recurrent states: plain's text and states, whatever was drafted and kept."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache, StoppingCriteria, TextStreamer

import lookahead_hf
from lookahead_hf.call import admission
from lookahead_hf.call.admission import Purpose
from lookahead_hf.engines import hybrid
from lookahead_hf.fallback import Unserved
from lookahead_hf.model import self_test
from lookahead_hf.model.facts import facts_of
from lookahead_hf.runner.patched import patched
from tests.helpers.architectures import build
from tests.helpers.caches import CACHE, assert_same_cache
from tests.helpers.compared import compared, speculated
from tests.helpers.models import prompt
from tests.helpers.recurrent import GREEDY, OTHERS, QUICK, RECURRENT, harsh_gap, padded
from tests.helpers.scripted import RandomChains, continuations, right, scripted

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("model_type", RECURRENT)
def test_a_type_writes_plains_text_with_more_than_two_tokens_per_step(model_type: str) -> None:
    model = build(model_type)
    for rows in (1, 3):
        for drawn in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}):
            call = {**padded(rows), "max_new_tokens": 48, "pad_token_id": 0, **drawn}
            stats = compared(model, lambda call=call: call, 17, RandomChains()).stats
            assert stats.tokens_per_step > 2
            assert stats.num_moved == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        *("nemotron_h", "qwen3_5_text"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (*QUICK, *OTHERS)
            if name not in ("nemotron_h", "qwen3_5_text")
        ),
    ],
)
def test_harsh_parameters_leave_the_logits_as_they_are(model_type: str) -> None:
    most = 1e-3 if model_type == "mamba2" else 1e-4  # it sums decays in float32
    assert harsh_gap(model_type) < most


def test_nothing_of_a_call_stays_on_the_model() -> None:
    model = build("qwen3_5_text")
    compared(model, lambda: {**padded(1), **GREEDY, "max_new_tokens": 12}, 17)
    assert facts_of(model).mixers
    assert not any("forward" in vars(module) for module in model.modules())


def test_other_forwards_on_the_model_are_its_own_during_a_call() -> None:
    model, ids = build("lfm2"), prompt(1, 17)
    with torch.no_grad():
        expected = model(ids).logits
        with patched(model):
            assert torch.equal(model(ids).logits, expected)


def test_copies_made_in_the_middle_of_a_call_are_the_models_own() -> None:
    model, ids = build("lfm2"), prompt(1, 12)
    copies: list[Any] = []

    class Copying(TextStreamer):
        def __init__(self) -> None:
            self.next_tokens_are_prompt = False

        def put(self, value: torch.Tensor) -> None:
            if len(copies) < 2:
                copies.extend([copy.deepcopy(model), pickle.loads(pickle.dumps(model.model))])

        def end(self) -> None:
            pass

    lookahead_hf.enable(model)
    model.generate(ids, max_new_tokens=8, **GREEDY, speculative=True, streamer=Copying())
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None
    whole, body = copies
    for made, original in ((whole.model, model.model), (body, model.model)):
        with torch.no_grad():
            expected = original(ids).last_hidden_state
            for each in original.parameters():
                each.mul_(2)
            assert torch.equal(made(ids).last_hidden_state, expected)
            for each in original.parameters():
                each.div_(2)


def test_a_call_of_a_processor_in_the_middle_of_a_call() -> None:
    model, texts = build("qwen3_5_text"), []

    def ask(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        if ids.shape[1] in (20, 27):
            again = {**GREEDY, "max_new_tokens": 8, "speculative": len(texts) % 2 == 0}
            texts.append(model.generate(prompt(1, 9), **again).tolist())
        return scores

    with lookahead_hf.enabled(model):
        call = {**padded(1), **GREEDY, "max_new_tokens": 24}
        compared(model, lambda: {**call, "logits_processor": [ask]}, 17, right(4))
    assert len(texts) == 4
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("model_type", ["falcon_h1", "lfm2", "qwen3_5_text"])
def test_a_users_cache_over_turns(model_type: str) -> None:
    model, rows = build(model_type), 3
    given, eos = padded(rows), {"eos_token_id": [7, 8]}
    caches = DynamicCache(config=model.config), DynamicCache(config=model.config)
    for turn in range(3):
        left = iter(caches)

        def call(given: Any = given, left: Any = left) -> dict[str, Any]:
            return {**given, **GREEDY, **eos, "max_new_tokens": 24, CACHE: next(left)}

        columns = given["input_ids"].shape[1]
        text = compared(model, call, columns, RandomChains(turn)).ours
        mask = torch.cat([given["attention_mask"], torch.ones_like(text[:, columns:])], 1)
        assert_same_cache(caches[1], caches[0], mask[:, :-1])
        ids = torch.cat([text, prompt(rows, 4, seed=turn)], 1)
        mask = torch.cat([mask, mask.new_ones(rows, 4)], 1)
        given = {"input_ids": ids, "attention_mask": mask}


class Raises(StoppingCriteria):
    """Raises when a row has so many columns."""

    def __init__(self, columns: int) -> None:
        self.columns = columns

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        if input_ids.shape[1] >= self.columns:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_cache_of_a_call_that_broke_off_serves_the_next(rows: int) -> None:
    model, given = build("qwen3_5_text"), padded(rows)
    plain = model.generate(**given, **GREEDY, max_new_tokens=40)
    cache = DynamicCache(config=model.config)
    config = scripted(continuations(plain, 17), RandomChains())
    call = {**given, **GREEDY, CACHE: cache, "speculative": config}
    with lookahead_hf.enabled(model), pytest.raises(KeyboardInterrupt):
        model.generate(**call, max_new_tokens=40, stopping_criteria=[Raises(38)])
    held = cache.get_seq_length()
    assert 17 < held < 38
    seen = plain[:, : max(held + 1, 18)]
    mask = torch.cat([given["attention_mask"], torch.ones_like(seen[:, 17:])], 1)
    again = {**GREEDY, "attention_mask": mask, "max_new_tokens": 57 - seen.shape[1]}
    assert torch.equal(model.generate(seen, **{CACHE: cache}, **again), plain)


@pytest.mark.parametrize("model_type", ["lfm2", "mamba2", "qwen3_5_text"])
def test_draft_invariant_bits(model_type: str) -> None:
    model = build(model_type).bfloat16()
    call = {**padded(3), **GREEDY, "max_new_tokens": 32, "return_dict_in_generate": True}
    call["output_logits"] = True
    logits = []
    with lookahead_hf.enabled(model):
        first = model.generate(**call, speculative={"draft_invariant": True, "budget": 0})
        truths = continuations(first.sequences, 17)
        for seed in range(2):
            drafts = replace(scripted(truths, RandomChains(seed)), draft_invariant=True)
            output = model.generate(**call, speculative=drafts)
            speculated(model)
            logits.append(output.logits)
    for ours in logits:
        assert all(map(torch.equal, ours, first.logits))


def test_a_mixer_that_forgets_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "passed", {})
    model = build("qwen3_5_text")
    behind = hybrid.ReplayMixer._behind_waiting

    def forgets(self: Any, inputs: torch.Tensor, most: int) -> torch.Tensor:
        joined = behind(self, inputs, most)
        return joined if not most else joined.index_fill(1, torch.tensor([0]), 0.0)

    monkeypatch.setattr(hybrid.ReplayMixer, "_behind_waiting", forgets)
    found, _ = self_test.refusal(model)
    assert "gives other logits for blocks" in found


def test_what_cannot_be_rolled_back_is_refused() -> None:
    model = build("lfm2")
    static = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(Unserved, match="static cache"):
        admission.admit(model, Purpose.CALL, static)
    with pytest.raises(Unserved, match="several modules"):
        admission.admit(build("inkling_text"), Purpose.CALL)


def test_what_has_to_be_a_tree_is_refused() -> None:
    model = build("lfm2")
    config = {"verification": "rejection", "on_fallback": "silent"}
    with lookahead_hf.enabled(model):
        call = {**padded(1), "do_sample": True, "max_new_tokens": 4}
        model.generate(**call, assistant_model=build("llama"), speculative=config)
        stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason == "stateful"
