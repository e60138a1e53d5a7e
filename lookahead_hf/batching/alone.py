"""Writes texts that cannot be decoded with others, by plain `generate`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from transformers import StoppingCriteriaList

from lookahead_hf import compat
from lookahead_hf.batching.log_probs import Found, Wanted
from lookahead_hf.batching.request import OBJECTS
from lookahead_hf.verification.generators import OwnGenerators


def write(
    model: Any,
    settings: dict[str, Any],
    seed: int,
    on_token: Callable[[], bool],
    log_probs: Wanted,
) -> tuple[list[int], Found]:
    """Return the new tokens of a request, and their log probabilities if these are wanted.

    Args:
        model: The model.
        settings: The arguments that `Maker.settings` returns.
        seed: The seed of the request.
        on_token: Called after every token; returns whether to stop.
        log_probs: The log probabilities to return.
    """

    def given_up(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), on_token(), device=input_ids.device)

    criteria = [*(settings.get("stopping_criteria") or ()), given_up]
    config = settings["generation_config"]
    config.return_dict_in_generate, config.output_scores = True, log_probs.of_tokens
    own = OwnGenerators(model.device, seed)
    with own.in_place() if _may_draw(model, settings) else nullcontext():
        given = {**settings, "stopping_criteria": StoppingCriteriaList(criteria)}
        output = compat.plain_generate(model, **given)
    tokens: list[int] = output.sequences[0, settings["input_ids"].shape[1] :].tolist()
    found = Found()
    if log_probs.of_tokens:
        beams = output.get("beam_indices", torch.zeros(1, len(tokens), dtype=torch.long))
        chosen = zip(output.scores, beams[0, : len(tokens)].tolist(), strict=False)
        found.add(log_probs, [scores[beam] for scores, beam in chosen], tokens)
    return tokens, found


def _may_draw(model: Any, settings: dict[str, Any]) -> bool:
    """Return whether a call may draw random numbers: it samples, or calls objects of a user."""
    do_sample = settings["generation_config"].do_sample
    if do_sample is None:
        do_sample = model.generation_config.do_sample
    return bool(do_sample) or any(settings.get(name) is not None for name in OBJECTS)
