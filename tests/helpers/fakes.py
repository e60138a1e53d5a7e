"""Stand-ins for tests of the entry: plain decoding in place of ours, streamers and wrappers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation import BaseStreamer

from lookahead_hf import stats
from lookahead_hf.call.prepared import PreparedCall


@dataclass
class PlainDecoding:
    """Takes the place of `decode`: keeps every call that reaches it and runs plain's own loop."""

    calls: list[PreparedCall] = field(default_factory=list)
    before: Callable[[PreparedCall], None] = lambda call: None

    def __call__(self, call: PreparedCall) -> Any:
        self.calls.append(call)
        self.before(call)
        streamer = call.request.streamer
        if streamer is not None:
            streamer.put(call.input_ids.cpu())
        output = call.model._sample(
            call.input_ids,
            logits_processor=call.processors,
            stopping_criteria=call.criteria,
            generation_config=call.generation_config,
            streamer=streamer,
            **call.model_kwargs,
        )
        stats.publish(call.model, stats.SpeculativeStats(rows=call.num_rows, engine="plain"))
        return output


class Recorder(BaseStreamer):
    """A streamer that keeps what it is given, and can raise at a chosen event."""

    def __init__(self, fail_at: int = -1) -> None:
        self.events: list[Any] = []
        self.fail_at = fail_at

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        if len(self.events) == self.fail_at:
            raise ConnectionError("the client went away")
        self.events.append(value.tolist())

    def end(self) -> None:
        self.events.append("end")
