"""Log probabilities of tokens are those of plain `generate`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lookahead_hf.queue.request import request_seed
from tests.helpers.requests import SEED, WAIT, prompts, seeded, settings, speculated

pytestmark = pytest.mark.filterwarnings("ignore:.*runs plain generate")

SETTINGS: list[dict[str, Any]] = [
    {"eos_token_id": [5, 40]},
    {"do_sample": True, "temperature": 0.8, "top_k": 20},
    {"repetition_penalty": 1.3},
]


def plain(model: Any, prompt: list[int], config: Any, index: int = 0) -> Any:
    """What plain `generate` returns for a prompt alone, with its scores."""
    torch.manual_seed(request_seed(SEED, index))
    ids, config = torch.tensor([prompt]), copy.deepcopy(config)
    config.return_dict_in_generate = config.output_scores = True
    given = {"attention_mask": torch.ones_like(ids), "generation_config": config}
    return model.generate(ids, **given, speculative=False)


@pytest.mark.parametrize("own", SETTINGS, ids=lambda own: next(iter(own)))
def test_log_probabilities_are_plains(model: Any, own: dict[str, Any]) -> None:
    config, texts = settings(model, **own), prompts(5)
    found = model.generate_batch(texts, config, seeded(return_logprobs=True), max_slots=3).values()
    for index, (output, text) in enumerate(zip(found, texts, strict=True)):
        alone = plain(model, text, config, index)
        tokens = alone.sequences[0, len(text) :].tolist()
        assert output.generated_tokens == tokens
        expected = [
            float(scores[0].log_softmax(-1)[token])
            for scores, token in zip(alone.scores, tokens, strict=True)
        ]
        assert output.logprobs == pytest.approx(expected, abs=1e-4)
    speculated(found)


def test_the_likeliest_tokens_are_plains(model: Any) -> None:
    config, texts = settings(model, repetition_penalty=1.3), prompts(4)
    found = model.generate_batch(texts, config, seeded(), max_slots=2, top_logprobs=3).values()
    for output, text in zip(found, texts, strict=True):
        scores = plain(model, text, config).scores
        assert len(output.top_logprobs) == len(scores) == len(output.logprobs)
        for best, each in zip(output.top_logprobs, scores, strict=True):
            expected = each[0].log_softmax(-1).topk(3)
            assert list(best) == expected.indices.tolist()
            assert list(best.values()) == pytest.approx(expected.values.tolist(), abs=1e-4)
    speculated(found)


def test_prompts_have_the_models_own(model: Any) -> None:
    texts = [*prompts(3), [7]]
    config = settings(model, repetition_penalty=1.3)
    found = model.generate_batch(texts, config, seeded(), prompt_logprobs=True).values()
    for output, text in zip(found, texts, strict=True):
        ids = torch.tensor([text])
        with torch.no_grad():
            log_probs = model(ids).logits[0].log_softmax(-1)
        expected = [float(log_probs[at, token]) for at, token in enumerate(text[1:])]
        assert output.prompt_logprobs[0] is None
        assert output.prompt_logprobs[1:] == pytest.approx(expected, abs=1e-4)
        assert output.logprobs == []
    speculated(found)


def test_beams_have_all_of_them(model: Any) -> None:
    asked, (text,) = {"top_logprobs": 2, "prompt_logprobs": True}, prompts(1)
    manager = model.init_continuous_batching(settings(model), **asked)
    manager.start()
    try:
        manager.add_request(text, num_beams=2, max_new_tokens=8)
        output = manager.get_result(timeout=WAIT)
    finally:
        manager.stop(hard_stop=True)
    assert output.speculative_stats.fallback_reason == "beams"
    assert len(output.prompt_logprobs) == len(text)
    assert [len(best) for best in output.top_logprobs] == [2] * 8
    beams = settings(model, num_beams=2, max_new_tokens=8)
    mean = plain(model, text, beams).sequences_scores[0]
    assert sum(output.logprobs) / 8 == pytest.approx(float(mean), abs=1e-4)


@pytest.mark.parametrize(
    "asked", [{"top_logprobs": -1}, {"top_logprobs": True}, {"prompt_logprobs": 5}], ids=str
)
def test_a_wrong_number_is_an_error(model: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(asked))} is .*, but must be"):
        model.generate_batch(prompts(1), settings(model), **asked)


def test_nobody_pays_for_what_was_not_asked(model: Any) -> None:
    found = model.generate_batch(prompts(2), settings(model), seeded()).values()
    for output in found:
        assert (output.logprobs, output.top_logprobs, output.prompt_logprobs) == ([], [], None)
