"""Log probabilities of tokens are those of plain `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lookahead_hf.queue.request import request_seed
from tests.helpers.requests import SEED, prompts, seeded, settings, speculated


@pytest.mark.filterwarnings("ignore:.*runs plain generate")
@pytest.mark.parametrize(
    "own",
    [
        {"eos_token_id": [5, 40]},
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"repetition_penalty": 1.3},
    ],
    ids=lambda own: next(iter(own)),
)
def test_log_probabilities_are_plains(model: Any, own: dict[str, Any]) -> None:
    """Of all tokens if the run asks for them; of the likeliest, too, if a request does."""
    config, texts = settings(model, **own), prompts(5)
    requests = [{"input_ids": text} for text in texts]
    for each in requests[::2]:
        each["top_logprobs"] = 3
    requests += [{"input_ids": [5], "top_logprobs": -1}, {"input_ids": [5], "num_beams": 2}]
    batching = seeded(return_logprobs=True)
    *found, wrong, beams = model.generate_batch(requests, config, batching, max_slots=3).values()
    for index, (output, text) in enumerate(zip(found, texts, strict=True)):
        torch.manual_seed(request_seed(SEED, index))
        ids, given = torch.tensor([text]), {"return_dict_in_generate": True, "output_scores": True}
        given |= {"generation_config": config, "attention_mask": torch.ones_like(ids)}
        alone = model.generate(ids, **given, speculative=False)
        tokens = alone.sequences[0, len(text) :].tolist()
        assert output.generated_tokens == tokens
        chosen = [scores[0].log_softmax(-1) for scores in alone.scores]
        expected = [float(each[token]) for each, token in zip(chosen, tokens, strict=True)]
        assert output.logprobs == pytest.approx(expected, abs=1e-4)
        best = [each.topk(3) for each in chosen] if index % 2 == 0 else []
        for top, likeliest in zip(output.top_logprobs, best, strict=True):
            assert list(top) == likeliest.indices.tolist()
            assert list(top.values()) == pytest.approx(likeliest.values.tolist(), abs=1e-4)
    speculated(found)
    assert "top_logprobs is -1" in wrong.error and "has no logprobs" in beams.error
    (plain,) = model.generate_batch(texts[:1], config).values()
    assert (plain.logprobs, plain.top_logprobs) == ([], [])
