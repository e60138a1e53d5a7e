"""Calls of `generate` whose tokens are timed one by one."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from transformers.generation.streamers import BaseStreamer

import lookahead_hf
from lookahead_hf.trace import MODEL


class Run(NamedTuple):
    """The tokens of a call."""

    times: list[float]  # seconds until each arrived
    ids: list[int]
    origins: list[str]  # who foresaw each


class Arrivals(BaseStreamer):  # type: ignore[misc]
    """Notes when the prompt and every token arrive."""

    def __init__(self) -> None:
        self.start, self.times = time.perf_counter(), list[float]()

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter() - self.start)

    def end(self) -> None:
        pass


def generate(model: Any, inputs: dict[str, Any], num_tokens: int, speculates: bool) -> Run:
    """Write a text greedily.

    Args:
        model: An enabled model.
        inputs: The prompt, `input_ids` and `attention_mask` [1, columns].
        num_tokens: Most new tokens.
        speculates: Whether drafts are verified and traced.
    """
    config = (
        lookahead_hf.SpeculativeConfig(trace=True, on_fallback="error") if speculates else False
    )
    arrivals = Arrivals()
    limits = {"max_new_tokens": num_tokens, "do_sample": False}
    output = model.generate(**inputs, **limits, streamer=arrivals, speculative=config)
    ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    stats = lookahead_hf.last_stats(model) if speculates else None
    return Run(arrivals.times[1:], ids, stats.trace.origins(0) if stats else [MODEL] * len(ids))
