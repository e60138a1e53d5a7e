"""Calls in which compiled kernels compute layers, and changes to models in the middle of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList

import lookahead_hf
from tests.helpers.models import prompt
from tests.helpers.scripted import RandomTrees, continuations, scripted


class Bits(NamedTuple):
    """A text, the bits of its logits, and how its steps were run."""

    text: list[list[int]]
    logits: list[list[float]]
    execution: str | None


def run(model: Any, compiled: bool, change: Callable[[], Any] | None = None) -> Bits:
    """Generate with the same trees whatever the model is, with a change in the middle of the call.

    The model stays enabled.
    """
    lookahead_hf.enable(model)
    call = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(prompt(), **call)
    config = scripted(continuations(plain.sequences, 12), RandomTrees(hit=1.0))
    output = model.generate(
        prompt(),
        **call,
        output_logits=True,
        speculative=replace(config, compiled_layers=compiled),
        logits_processor=LogitsProcessorList([Once(change)]) if change else None,
    )
    stats = output.speculative_stats
    assert stats.fallback_reason is None and stats.num_accepted > 0
    text = output.sequences.tolist()
    assert change is not None or text == plain.sequences.tolist()
    logits = torch.cat(output.logits).tolist()
    return Bits(text, logits, stats.execution)


class Once(LogitsProcessor):
    """Does something to the model in the middle of a call."""

    def __init__(self, change: Callable[[], Any]) -> None:
        self.change, self.is_done = change, False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= 30 and not self.is_done:
            self.is_done = True
            self.change()
        return scores


def in_a_forward(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Put a change to a model off until the first layer has run in the next forward."""

    def prepare(model: Any) -> None:
        def hook(*_: Any) -> None:
            handle.remove()
            change(model)

        handle = model.model.layers[0].register_forward_hook(hook)

    return prepare


class Lora(nn.Module):
    """An adapter around a linear layer, as PEFT's."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.scaling, self.is_on = base, 2.0, True
        dtype = base.weight.dtype
        self.down = nn.Linear(base.in_features, 4, bias=False, dtype=dtype)
        self.up = nn.Linear(4, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        return out + self.up(self.down(x)) * self.scaling if self.is_on else out

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to the layer's weight as PEFT does, through `.data`."""
        self.base.weight.data += self.up.weight @ self.down.weight * self.scaling
        self.is_on = False


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls at once, each in a thread of its own; return what they return, in their order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
