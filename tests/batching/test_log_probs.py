"""Log probabilities of tokens are those of plain `generate`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lookahead_hf.batching.request import request_seed
from tests.helpers.requests import SEED, WAIT, prompts, running, seeded, settings, speculated

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


def test_beams_have_them_too(model: Any) -> None:
    own, (text,) = {"num_beams": 2, "max_new_tokens": 8}, prompts(1)
    with running(model, settings(model), return_logprobs=True) as manager:
        manager.add_request(text, **own)
        output = manager.get_result(timeout=WAIT)
    assert output.speculative_stats.fallback_reason == "beams"
    mean = plain(model, text, settings(model, **own)).sequences_scores[0]
    assert sum(output.logprobs) / len(output.logprobs) == pytest.approx(float(mean), abs=1e-4)


def test_nobody_pays_for_what_was_not_asked(model: Any) -> None:
    found = model.generate_batch(prompts(2), settings(model), seeded()).values()
    assert [output.logprobs for output in found] == [[], []]
