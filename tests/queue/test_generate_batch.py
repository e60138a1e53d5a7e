"""`generate_batch`: every text is the one that `generate` writes for its prompt alone."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from transformers import StoppingCriteriaList, StopStringCriteria

import lookahead_hf
from lookahead_hf.queue import scheduler
from tests.helpers import models, random_calls, requests
from tests.helpers.requests import DRAFTED, alone, prompts, seeded, settings, speculated


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma3"])
def model(request: pytest.FixtureRequest) -> Any:
    return lookahead_hf.enable(models.tiny(request.param))


@examples(max_examples=8, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (8, 3, 40, 5, 30))),
    most=st.one_of(st.none(), st.integers(1, 40)),
    seed=st.integers(0, 99),
    do_sample=st.booleans(),
    budget=st.integers(0, 9),
)
def test_nothing_but_the_request_decides_about_its_text(
    sizes: tuple[int, ...], most: int | None, seed: int, do_sample: bool, budget: int
) -> None:
    count, siblings, piece, slots, longest = sizes
    model = lookahead_hf.enable(models.tiny("llama"))
    texts = prompts(count, seed)
    config = settings(model, max_new_tokens=longest, do_sample=do_sample, eos_token_id=[9, 70])
    config.num_return_sequences = siblings if do_sample else 1
    drafted = lookahead_hf.SpeculativeConfig(budget=budget)
    with mock.patch.object(scheduler, "CHUNK", piece):
        batching = seeded(max_batch_tokens=most)
        found = model.generate_batch(texts, config, batching, speculative=drafted, max_slots=slots)
    each = [text for text in texts for _ in range(config.num_return_sequences)]
    expected = [alone(model, text, config, index) for index, text in enumerate(each)]
    assert [output.generated_tokens for output in found.values()] == expected


@pytest.mark.parametrize("of_model", [False, True])
def test_stop_strings_end_texts(
    model: Any, of_model: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, config = prompts(5), settings(model)
    characters = random_calls.tokenizer()
    longest = [alone(model, text, config, index) for index, text in enumerate(texts)]
    words = [characters.decode(tokens[8:9]) for tokens in longest[:2]]
    if of_model:
        monkeypatch.setattr(model.generation_config, "stop_strings", words)
    else:
        config = settings(model, stop_strings=words)
    given = {"tokenizer": characters, "speculative": DRAFTED, "max_slots": 2}
    found = model.generate_batch(texts, config, seeded(), **given)
    expected = [
        alone(model, text, config, index, tokenizer=characters) for index, text in enumerate(texts)
    ]
    assert [output.generated_tokens for output in found.values()] == expected
    assert expected != longest
    speculated(found.values())


def test_seeds_of_a_run_differ() -> None:
    seeds = {requests.request_seed(3, index) for index in range(10_000)}
    assert len(seeds) == 10_000
    assert requests.request_seed(3, 0) != requests.request_seed(4, 0)


def test_requests_with_settings_of_their_own(model: Any) -> None:
    texts, config, characters = prompts(5), settings(model), random_calls.tokenizer()
    word = characters.decode(alone(model, texts[3], config)[6:7])
    own: list[dict[str, Any]] = [
        {},
        {"max_new_tokens": 5, "request_id": "short", "group": None},
        {"do_sample": True, "temperature": 0.7, "top_k": 0, "seed": 31},
        {"stop_strings": [word], "repetition_penalty": 1.1, "top_logprobs": 2},
        {"stopping_criteria": [requests.Breaks(0)]},
    ]
    given = [{"input_ids": text, **each} for text, each in zip(texts, own, strict=True)]
    batch = {"speculative": DRAFTED, "max_slots": 4, "tokenizer": characters}
    found = model.generate_batch(given, config, **batch)
    assert [*found] == ["req_0", "short", "req_2", "req_3", "req_4"]
    outputs, ours = list(found.values()), ("request_id", "top_logprobs", "group")
    assert "a callback that fails" in outputs.pop().error
    for output, text, each in zip(outputs, texts, own, strict=False):
        each = {name: each[name] for name in each if name not in ours}
        torch.manual_seed(each.pop("seed", 0))
        ids = torch.tensor([text])
        each |= {"tokenizer": characters, "attention_mask": torch.ones_like(ids)}
        expected = model.generate(ids, generation_config=config, **each)[0, len(text) :].tolist()
        assert output.generated_tokens == expected
    assert [len(output.top_logprobs) for output in outputs] == [0, 0, 0, len(expected)]
    speculated(outputs)


def test_a_requests_own_stop_strings_come_first(model: Any) -> None:
    """As in plain generation, where its criterion takes the place of the settings'."""
    characters, (text,) = random_calls.tokenizer(), prompts(1)
    tokens = alone(model, text, settings(model))
    newest = max(at for at, token in enumerate(tokens) if token not in tokens[:at])
    early, late = (characters.decode(tokens[at : at + 1]) for at in (2, newest))
    config = settings(model, stop_strings=[early])
    own = {"stopping_criteria": StoppingCriteriaList([StopStringCriteria(characters, [late])])}
    given = {"speculative": DRAFTED, "tokenizer": characters}
    (output,) = model.generate_batch([{"input_ids": text, **own}], config, **given).values()
    assert output.generated_tokens == alone(model, text, config, tokenizer=characters, **own)
    speculated([output])


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ([{"prompt": [1]}], "a request has no list of token ids"),
        ([{"input_ids": 1}], "a request has no list of token ids"),
        ([{"input_ids": [1], "max_new_tokens": "4"}], "max_new_tokens is '4'"),
        ([{"input_ids": [1], "request_id": "a"}] * 2, "two requests have the same request_id"),
    ],
)
def test_wrong_requests_are_refused(model: Any, wrong: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        model.generate_batch(wrong, settings(model), speculative=DRAFTED)
    with pytest.raises(ValueError, match="knows no requests with settings of their own"):
        model.generate_batch(wrong, settings(model), speculative=False)
