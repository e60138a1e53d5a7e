"""Requests of continuous batching, and the texts that `generate` writes for each of them alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig

import lookahead_hf
from lookahead_hf.batching.request import request_seed
from tests.helpers.models import VOCAB

SEED = 11
DRAFTED = lookahead_hf.SpeculativeConfig(budget=6)
"""Drafts in every step, whatever that costs."""


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


def alone(model: Any, prompt: Sequence[int], config: Any, index: int = 0) -> list[int]:
    """The tokens that plain `generate` writes for a prompt alone, with the seed of its request."""
    torch.manual_seed(request_seed(SEED, index))
    ids = torch.tensor([prompt])
    config = copy.deepcopy(config)
    config.num_return_sequences = 1
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, generation_config=config, speculative=False)
    return out[0, len(prompt) :].tolist()


def speculated(outputs: Any) -> list[lookahead_hf.SpeculativeStats]:
    """The statistics of requests that all were speculated; some of their drafts were right."""
    found = [output.speculative_stats for output in outputs]
    assert all(stats is not None and stats.fallback_reason is None for stats in found)
    assert sum(stats.num_accepted for stats in found) > 0
    return found
