"""Lets plain `generate` write a text that cannot be decoded together with others."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import StoppingCriteriaList

from lookahead_hf import compat
from lookahead_hf.batching.request import OBJECTS

_drawing = threading.RLock()
"""Held while plain `generate` draws from the default generator, which all runs share."""


def _renew_lock() -> None:
    """Make the lock anew: in a forked process, nobody is left to release it."""
    global _drawing
    _drawing = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def write(
    model: Any, settings: dict[str, Any], seed: int, is_given_up: Callable[[], bool]
) -> list[int]:
    """Write the text of a request.

    Args:
        model: The target.
        settings: Arguments of `generate`, see `Maker.settings`.
        seed: The seed of the text's samples.
        is_given_up: Asked after every token whether nobody wants the text any more.

    Returns:
        The tokens after the prompt.

    Raises:
        Exception: Whatever `generate` raises.
    """

    def given_up(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), is_given_up(), device=input_ids.device)

    criteria = [*(settings.get("stopping_criteria") or ()), given_up]
    settings["generation_config"].return_dict_in_generate = False
    draws = _seeded(model.device, seed) if _may_draw(model, settings) else nullcontext()
    with draws:
        given = {**settings, "stopping_criteria": StoppingCriteriaList(criteria)}
        ids = compat.plain_generate(model, **given)
    tokens: list[int] = ids[0, settings["input_ids"].shape[1] :].tolist()
    return tokens


def _may_draw(model: Any, settings: dict[str, Any]) -> bool:
    """Whether a call may draw random numbers: it samples, or it calls what we do not know."""
    do_sample = settings["generation_config"].do_sample
    if do_sample is None:
        do_sample = model.generation_config.do_sample
    return bool(do_sample) or any(settings.get(name) is not None for name in OBJECTS)


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the default generators inside, and give them their old states back at the end."""
    on_cpu = device.type == "cpu"
    devices = [] if on_cpu else [*range(torch.get_device_module(device).device_count())]
    kind = "cuda" if on_cpu else device.type
    with _drawing, torch.random.fork_rng(devices, device_type=kind):
        (torch.default_generator if on_cpu else torch.random).manual_seed(seed)
        yield
