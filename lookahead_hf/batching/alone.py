"""Writes texts that cannot be decoded with others, by plain `generate`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from transformers import StoppingCriteriaList

from lookahead_hf import compat
from lookahead_hf.batching.generators import OwnGenerators
from lookahead_hf.batching.request import OBJECTS


def write(
    model: Any, settings: dict[str, Any], seed: int, on_token: Callable[[], bool]
) -> list[int]:
    """Return the new tokens of a request, from the arguments that `Maker.settings` returns.

    `on_token` is called after every token and returns whether to stop.
    """

    def given_up(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), on_token(), device=input_ids.device)

    criteria = [*(settings.get("stopping_criteria") or ()), given_up]
    settings["generation_config"].return_dict_in_generate = False
    own = OwnGenerators(model.device, seed)
    with own.in_place() if _may_draw(model, settings) else nullcontext():
        given = {**settings, "stopping_criteria": StoppingCriteriaList(criteria)}
        ids = compat.plain_generate(model, **given)
    tokens: list[int] = ids[0, settings["input_ids"].shape[1] :].tolist()
    return tokens


def _may_draw(model: Any, settings: dict[str, Any]) -> bool:
    """Return whether a call may draw random numbers: it samples, or calls objects of a user."""
    do_sample = settings["generation_config"].do_sample
    if do_sample is None:
        do_sample = model.generation_config.do_sample
    return bool(do_sample) or any(settings.get(name) is not None for name in OBJECTS)
