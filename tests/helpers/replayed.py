"""Calls whose steps are replayed, with a tape of CPU operations in place of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import lookahead_hf
from tests.helpers.calls import GREEDY
from tests.helpers.compared import compared, served
from tests.helpers.device import TapeRecorder
from tests.helpers.models import prompt, tiny
from tests.helpers.scripted import RandomTrees, scripted

WIDTHS = (16, 4, 1)


def small() -> Any:
    """A model of two layers."""
    return tiny("llama", num_hidden_layers=2)


def compare(
    model: Any, inputs: dict[str, torch.Tensor], fields: dict[str, Any] | None = None, **call: Any
) -> lookahead_hf.SpeculativeStats:
    """Assert that replayed steps give plain's text and random state; return what was done."""
    stats = compare_calls(model, lambda: {**GREEDY, **call, **inputs}, fields)
    assert stats.engine == "device"
    return stats


def compare_calls(
    model: Any, call: Callable[[], dict[str, Any]], fields: dict[str, Any] | None = None
) -> lookahead_hf.SpeculativeStats:
    """Do the same for calls of any engine, whose arguments are made anew for each."""

    def on_device() -> dict[str, Any]:
        tensors = torch.Tensor
        made = call().items()
        return {k: v.to(model.device) if isinstance(v, tensors) else v for k, v in made}

    fields = {"cuda_graphs": True, **(fields or {})}
    lookahead_hf.enable(model)  # graphs are freed where `enabled` ends
    return compared(model, on_device, call()["input_ids"].shape[1], **fields).stats


def sets_of(made: list[TapeRecorder]) -> list[TapeRecorder]:
    """Return the recorders that captured a step."""
    return [recorder for recorder in made if recorder.recordings]


class Switch:
    """A streamer that calls a function once after a given number of tokens."""

    def __init__(self, changes: dict[int, Callable[[], Any]]) -> None:
        self.changes, self.num_tokens = changes, 0

    def put(self, value: torch.Tensor) -> None:
        if value.dim() == 1:
            self.num_tokens += 1
            self.changes.pop(self.num_tokens, lambda: None)()

    def end(self) -> None:
        pass


def streamed(
    model: Any, asked: bool | str, streamer: Any = None, **fields: Any
) -> tuple[list[int], lookahead_hf.SpeculativeStats]:
    """Return a text that the same trees drafted in every call, and what speculation did.

    Graphs may be `asked` for. The model stays enabled.
    """
    truth = list(range(3, 60))
    config = replace(scripted([truth], RandomTrees(hit=1.0)), cuda_graphs=asked, **fields)
    model.generation_config.eos_token_id = None
    lookahead_hf.enable(model)
    output = model.generate(prompt(), **GREEDY, speculative=config, streamer=streamer)
    stats = served(model)
    assert stats.engine == "device"
    return output[0].tolist(), stats
