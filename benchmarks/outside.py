"""Time what a step of `generate` takes outside the model's forward.

The rest is drafting, preparing and launching, reading the verdict, emitting and learning. A greedy
call drafts up to `--nodes` tokens in every step. `step` is the time of a step, `forward` the part
in which the device runs the replayed graph (on a CPU, the time of the forward), `outside` the rest,
all in microseconds. Of `--rounds` calls, the one with the least `outside` counts.

    python benchmarks/outside.py --json outside.json
    python benchmarks/outside.py --shapes 0.1B --dtype float32 --new-tokens 64
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import common
import torch
from common import Report
from kernel_times import wait
from step import counted, load, said, shapes_parser

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.engines.cuda.capture import Recording
from lookahead_hf.runner.host import Runner


@dataclass(frozen=True)
class Line:
    """A step of one shape, in microseconds."""

    shape: str
    steps: int | None = None
    tokens_per_step: float | None = None
    step: float | None = None
    forward: float | None = None
    outside: float | None = None
    ran: str = ""


@contextmanager
def timed_forwards(on_device: bool) -> Iterator[list[Callable[[], float]]]:
    """Yield functions that return the microseconds of each forward once all have run."""
    spans: list[Callable[[], float]] = []
    kind: Any = Recording if on_device else Runner
    name = "replay" if on_device else "forward"
    forward = getattr(kind, name)

    def on_clock(target: Any, *inputs: Any) -> Any:
        start = time.perf_counter()
        outputs = forward(target, *inputs)
        seconds = time.perf_counter() - start
        spans.append(lambda: seconds * 1e6)
        return outputs

    def on_stream(target: Any, *inputs: Any) -> Any:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        outputs = forward(target, *inputs)
        end.record()
        spans.append(lambda: start.elapsed_time(end) * 1e3)
        return outputs

    with patch.object(kind, name, on_stream if on_device else on_clock):
        yield spans


def measure(model: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return the call with the least time outside its forwards; the first only captures."""
    ids = torch.randint(3, model.config.vocab_size, (1, options.context), device=model.device)
    call = {"max_new_tokens": options.new_tokens, "do_sample": False, "pad_token_id": 0}
    model.generation_config.eos_token_id = None
    config = SpeculativeConfig(budget=options.nodes)
    lines: list[dict[str, Any]] = []
    with lookahead_hf.enabled(model), counted() as asked:
        lookahead_hf.warm_up(model, seconds=None)
        for _ in range(1 + options.rounds):
            with timed_forwards(model.device.type == "cuda") as spans:
                model.generate(ids, **call, speculative=config)
                wait(model.device)
            stats = lookahead_hf.last_stats(model)
            assert stats is not None and stats.fallback_reason is None
            assert spans, f"no step was replayed: {stats.execution}"
            took = stats.draft_ms + stats.forward_ms + stats.verify_ms + stats.commit_ms
            step = took * 1e3 / stats.num_steps
            forward = sum(span() for span in spans) / len(spans)
            line = {"steps": stats.num_steps, "tokens_per_step": stats.tokens_per_step}
            line |= {"step": step, "forward": forward, "outside": step - forward}
            lines.append(line | {"ran": said(stats.execution, asked, model.device)})
    return min(lines[1:], key=lambda line: line["outside"])


def main() -> None:
    """Measure, print a table, write the file."""
    shapes = ["0.1B", "1B"] if torch.cuda.is_available() else ["0.1B"]
    numbers = {"nodes": 15, "context": 512, "new_tokens": 256, "rounds": 3}
    options = common.parsed(shapes_parser(__doc__, shapes, **numbers), nodes=3, new_tokens=40)
    torch.manual_seed(0)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    report = Report(options, device=options.device, dtype=options.dtype)
    for shape in [Path(options.model).name] if options.model else options.shapes:
        model = load(shape, options.model, dtype, device)
        report.add(Line(shape), partial(measure, model, options))
    report.end()


if __name__ == "__main__":
    main()
