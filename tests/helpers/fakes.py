"""Stand-ins for tests of the entry: plain decoding in place of ours, streamers and wrappers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation import BaseStreamer

from lookahead_hf import stats


@dataclass
class Decoded:
    """One call that reached decoding."""

    model: Any
    input_ids: torch.Tensor
    stopping_criteria: Any
    generation_config: Any
    model_kwargs: dict[str, Any]
    request: Any


@dataclass
class PlainDecoding:
    """Takes the place of `decode`: keeps every call that reaches it and runs plain's own loop."""

    calls: list[Decoded] = field(default_factory=list)
    before: Callable[[Decoded], None] = lambda call: None

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        request: Any,
    ) -> Any:
        call = Decoded(
            model, input_ids, stopping_criteria, generation_config, dict(model_kwargs), request
        )
        self.calls.append(call)
        self.before(call)
        if request.streamer is not None:
            request.streamer.put(input_ids.cpu())
        output = model._sample(
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            streamer=request.streamer,
            **model_kwargs,
        )
        stats.publish(model, stats.SpeculativeStats(rows=len(input_ids), engine="plain"))
        return output


class Recorder(BaseStreamer):
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.events.append(value.tolist())

    def end(self) -> None:
        self.events.append("end")


class Cancelled(Exception):
    """What `CancelsLate` raises."""


class CancelsLate:
    """A streamer that ends its call after some tokens."""

    def __init__(self, most: int) -> None:
        self.left = most

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise Cancelled

    def end(self) -> None:
        """Nothing to end."""
