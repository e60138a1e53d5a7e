"""Count the lines of Python that warm steps run, and time steps on which a model is no weight.

The model has random weights, and layers so narrow that nearly all of a step's time is spent in
Python and in operations of torch. Texts are sampled. Lines are those of the package, counted by
`sys.settrace`.

    python benchmarks/host_work.py --layers 30 --json host_work.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch
from common import Report
from transformers import LlamaConfig, LlamaForCausalLM

import lookahead_hf

PACKAGE = str(Path(lookahead_hf.__file__).parent)


@dataclass(frozen=True)
class Line:
    """Steps with so many draft tokens each: lines of Python and milliseconds per step."""

    layers: int
    nodes: int
    steps: int = 0
    lines: float | None = None
    milliseconds: float | None = None


@contextmanager
def lines_counted() -> Iterator[list[int]]:
    """Yield a list whose only number counts the package's lines that run inside."""
    count = [0]

    def on_line(frame: Any, event: str, _: Any) -> Any:
        count[0] += event == "line"
        return on_line

    sys.settrace(lambda frame, *_: on_line if PACKAGE in frame.f_code.co_filename else None)
    try:
        yield count
    finally:
        sys.settrace(None)


def measure(model: Any, nodes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time calls with this budget, then count the lines of one more."""
    given = {"min_new_tokens": options.new_tokens, "max_new_tokens": options.new_tokens}
    given |= {"do_sample": True, "pad_token_id": 0, "speculative": {"budget": nodes}}
    ids = torch.randint(3, 512, (1, 64), generator=torch.Generator().manual_seed(0))

    def call() -> int:
        torch.manual_seed(0)
        model.generate(ids, attention_mask=torch.ones_like(ids), **given)
        stats = lookahead_hf.last_stats(model)
        assert stats is not None and stats.fallback_reason is None
        return stats.num_steps

    call(), call()
    best = float("inf")
    for _ in range(options.rounds):
        start = time.perf_counter()
        steps = call()
        best = min(best, (time.perf_counter() - start) / steps)
    with lines_counted() as lines:
        steps = call()
    return {"steps": steps, "lines": round(lines[0] / steps), "milliseconds": best * 1e3}


def main() -> None:
    """Measure, print a table, write the file."""
    parser = common.parser(__doc__, layers=30, new_tokens=160, rounds=10)
    parser.add_argument("--nodes", type=common.numbers, default=[0, 15])
    options = common.parsed(parser)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(num_hidden_layers=options.layers, **sizes, **heads)
    model = LlamaForCausalLM(config).to(getattr(torch, options.dtype)).eval()
    lookahead_hf.enable(model)
    lookahead_hf.warm_up(model, seconds=None)
    report = Report(options, dtype=options.dtype, new_tokens=options.new_tokens)
    for nodes in options.nodes:
        report.add(Line(options.layers, nodes), lambda n=nodes: measure(model, n, options))
    report.end()


if __name__ == "__main__":
    main()
