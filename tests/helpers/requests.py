"""Requests of continuous batching, and the texts that `generate` writes for each of them alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, StoppingCriteria, StoppingCriteriaList

import lookahead_hf
from lookahead_hf.queue.manager import SpeculativeBatchingManager
from lookahead_hf.queue.request import request_seed
from tests.helpers.models import VOCAB

SEED = 11
DRAFTED = lookahead_hf.SpeculativeConfig(budget=6)  # Drafts in every step, whatever that costs
WAIT = 60  # Most seconds for which a test waits for a result


def prompts(count: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    """Random prompts of random lengths."""
    chosen = random.Random(seed)
    lengths = [chosen.randint(1, longest) for _ in range(count)]
    return [[chosen.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def settings(model: Any, **own: Any) -> Any:
    """The generation config of a model, greedy and for 24 tokens unless `own` says otherwise."""
    config = copy.deepcopy(model.generation_config)
    config.update(**{"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **own})
    return config


def seeded(**own: Any) -> ContinuousBatchingConfig:
    """A configuration with a seed."""
    return ContinuousBatchingConfig(**{"seed": SEED, **own})


def alone(
    model: Any, prompt: Sequence[int], config: Any, index: int = 0, **objects: Any
) -> list[int]:
    """The tokens that plain `generate` writes for a prompt alone, with the seed of its request."""
    torch.manual_seed(request_seed(SEED, index))
    ids = torch.tensor([prompt], device=model.device)
    config = copy.deepcopy(config)
    config.num_return_sequences = 1
    mask = torch.ones_like(ids)
    given = {"attention_mask": mask, "generation_config": config, **objects}
    out = model.generate(ids, **given, speculative=False)
    return out[0, len(prompt) :].tolist()


def speculated(outputs: Any) -> list[lookahead_hf.SpeculativeStats]:
    """The statistics of requests that all were speculated; some of their drafts were right."""
    found = [output.speculative_stats for output in outputs]
    assert all(stats is not None and stats.fallback_reason is None for stats in found)
    assert sum(stats.num_accepted for stats in found) > 0
    return found


@contextmanager
def running(model: Any, config: Any, max_slots: int = 2, **own: Any) -> Iterator[Any]:
    """A manager that runs; `own` goes to its configuration."""
    manager = model.init_continuous_batching(config, seeded(**own), max_slots=max_slots)
    assert isinstance(manager, SpeculativeBatchingManager)
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(hard_stop=True)


def results(manager: Any, count: int) -> dict[str, Any]:
    """The results of so many requests, by their ids."""
    found = [manager.get_result(timeout=WAIT) for _ in range(count)]
    return {output.request_id: output for output in found}


def result_of_another(manager: Any, name: str) -> Any:
    """The first result that is not of the request `name`, which has not ended."""
    while (output := manager.get_result(timeout=WAIT)).request_id == name:
        assert not output.is_finished()
    return output


class Breaks(StoppingCriteria):
    """Raises once a text has so many tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] >= self.length:
            raise KeyError("a callback that fails")
        return torch.zeros(len(input_ids), dtype=torch.bool)


def broken_after(length: int) -> dict[str, Any]:
    """Arguments of a request that fails once its text, with the prompt, has so many tokens."""
    return {"stopping_criteria": StoppingCriteriaList([Breaks(length)])}
