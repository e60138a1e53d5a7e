"""Costs of prompts and steps, measured on the model or given as a curve."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from lookahead_hf.cli.measuring import Call, timed_call
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.drafting.control.cost_model import SIZES

if TYPE_CHECKING:
    from lookahead_hf.stats import SpeculativeStats

PLAIN_TOKENS, OUR_TOKENS = 24, 64
"""Tokens of the calls that measure the costs."""

ROUNDS = 2
MOST_NODES = 64
ASSUMED = {0: 1.0, 8: 1.2, 16: 1.4, 32: 1.75, 64: 2.5}
"""Cost of a step by draft tokens, in plain steps: a 135M model on two CPU cores."""


@dataclass(frozen=True)
class Costs:
    """Costs of calls of one range of prompt lengths, in seconds or, if given, in plain steps.

    Attributes:
        steps: A step of this library by draft tokens, verification and commit included.
        drafting: Drafting and learning, per step.
        plain_prefill: The prompt in plain `generate`, per token of the prompt.
        prefill: The same in a speculative call, with all that happens once per call.
    """

    plain_step: float
    steps: Mapping[int, float]
    drafting: float = 0.0
    plain_prefill: float = 0.0
    prefill: float = 0.0

    def step(self, num_nodes: int, length: int = 0) -> float:
        """Return the cost of a step with `num_nodes` draft tokens, at any length of the text."""
        return float(np.interp(num_nodes, list(self.steps), list(self.steps.values())))


def length_class(num_tokens: int) -> int:
    """Return the range of lengths that costs are told apart by: powers of two."""
    return int(num_tokens).bit_length()


def write(model: Any, inputs: dict[str, Any], new_tokens: int) -> Call:
    """Generate a text speculatively with the default setting, or raise SpeculationFallbackError."""
    config = SpeculativeConfig(on_fallback="error")
    return timed_call(model, {**inputs, "max_new_tokens": new_tokens, "speculative": config})


def measure(model: Any, inputs: dict[str, Any]) -> tuple[Costs, Call]:
    """Measure the costs of calls on prompts of about the length of `inputs`.

    Plain and speculative calls take turns; the last speculative one is also returned.
    """
    import lookahead_hf

    columns = int(inputs["input_ids"].shape[1])
    lookahead_hf.warm_up(model, context_length=columns + OUR_TOKENS // 2)
    plain, once, drafting = [], [], []
    for _ in range(ROUNDS):
        plain.append(_plain_times(model, inputs))
        call = write(model, inputs, OUR_TOKENS)
        stats: Any = call.stats
        in_steps = stats.draft_ms + stats.forward_ms + stats.verify_ms + stats.commit_ms
        once.append(call.seconds - in_steps / 1e3)
        drafting.append(stats.draft_ms / 1e3 / max(stats.num_steps, 1))
    gaps = np.concatenate([np.diff(times) for times in plain])
    costs = Costs(
        plain_step=float(np.quantile(gaps, 0.25)) if len(gaps) else plain[0][0],
        steps=_learned(model, columns, stats),
        drafting=min(drafting),
        plain_prefill=min(times[0] for times in plain) / columns,
        prefill=min(once) / columns,
    )
    return costs, call


def _plain_times(model: Any, inputs: dict[str, Any]) -> list[float]:
    """Return the seconds from the start of a plain call to each of its tokens."""
    times: list[float] = []
    clock = SimpleNamespace(put=lambda _: times.append(time.perf_counter()), end=lambda: None)
    start = time.perf_counter()
    model.generate(**inputs, max_new_tokens=PLAIN_TOKENS, streamer=clock, speculative=False)
    return [at - start for at in times[1:]]  # a streamer is given the prompt first


def _learned(model: Any, columns: int, stats: SpeculativeStats) -> dict[int, float]:
    """Return what the model's calls have learned about their steps at this length."""
    from lookahead_hf.drafting.memory import memory_of, placement

    on_device = "device" if stats.engine == "device" else ""
    mode = {"compiled": "compiled", "replayed": "graphs"}.get(str(stats.execution), on_device)
    length = columns + OUR_TOKENS // 2
    curve = memory_of(model).costs.curve(1, length, placement(model), mode)
    sizes = [size for size in SIZES if size <= MOST_NODES]
    return dict(zip(sizes, curve.seconds(np.array(sizes)).tolist(), strict=True))


def curve_of(context: Any, option: Any, value: str | None) -> dict[int, float] | None:
    """Read an option's curve of costs, such as `0:1,8:1.2,64:2.5`; "assumed" is a CPU's."""
    if value is None or value == "assumed":
        return ASSUMED if value else None
    try:
        curve = {
            int(nodes): float(cost)
            for nodes, cost in (pair.split(":") for pair in value.split(","))
        }
    except ValueError:
        curve = {}
    if 0 not in curve or min(curve) < 0 or not all(0 < cost < 1e6 for cost in curve.values()):
        raise click.BadParameter(
            f"{value!r} is not a curve: write pairs such as 0:1,8:1.2,64:2.5, where 0 is a step "
            "without drafts, or 'assumed'"
        )
    return dict(sorted(curve.items()))
