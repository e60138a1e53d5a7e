"""List what a device runs in one step of ours: every kernel with its launches and its time.

On a GPU the step is replayed as a CUDA graph, and what runs are kernels. On a CPU the same step is
run, and what is listed are torch's operations, also those that launch nothing. The line `all` is
their sum, and the costliest follow it. `--products` instead times the matrix products of the shape
by the tokens that they take, over as many copies of its weight as no cache holds.

    python benchmarks/launches.py --shapes 8B --nodes 0,15,63 --json launches.json
    python benchmarks/launches.py --shapes 8B --products --json products.json
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import torch
from common import Report
from kernel_times import microseconds, rotated
from step import SHAPES, Bench, counted, load, said, shapes_parser
from torch.profiler import ProfilerActivity, profile

TOKENS = (1, 8, 16, 32, 64, 128, 256, 512)
"""Tokens of the products."""


@dataclass(frozen=True)
class Line:
    """One kernel in one step, or one product: microseconds of all launches together."""

    shape: str
    tokens: int
    name: str = ""
    launches: int = 1
    microseconds: float | None = None
    gigabytes_per_second: float | None = None
    ran: str = ""


def launches(bench: Bench, nodes: int) -> list[dict[str, Any]]:
    """Profile a step with so many nodes, the costliest kernels first."""
    on_gpu = bench.model.device.type == "cuda"
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with counted() as asked, bench.stepping(nodes, on_gpu, on_device=True) as work:
        work.step(), work.step()
        with profile(activities=[kind]) as seen:
            work.step()
        ran = said(work.target.execution, asked, bench.model.device)
    spent = "device_time_total" if on_gpu else "self_cpu_time_total"
    events = [(getattr(each, spent), each.count, each.key[:100]) for each in seen.key_averages()]
    events = sorted((each for each in events if each[0]), reverse=True)
    whole = sum(event[0] for event in events), sum(event[1] for event in events), "all"
    names = "microseconds", "launches", "name"
    return [dict(zip(names, event, strict=True), ran=ran) for event in (whole, *events)]


def products(report: Report, shape: str, options: argparse.Namespace) -> None:
    """Time the products of a layer and of the head, and of layers that read the same input."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    for name, (inputs, outputs) in sizes_of(shape).items():
        nbytes = inputs * outputs * dtype.itemsize
        copies = max(4, -(-rotated(device, None) // nbytes))
        weights = [torch.randn(outputs, inputs, device=device).to(dtype) for _ in range(copies)]

        def timed(tokens: int, weights: list[torch.Tensor] = weights) -> dict[str, float]:
            x = torch.randn(tokens, weights[0].shape[1], device=device).to(dtype)

            def work() -> None:
                for weight in weights:
                    torch.nn.functional.linear(x, weight)

            spent = microseconds(work, device, options.rounds) / len(weights)
            return {"microseconds": spent, "gigabytes_per_second": weights[0].nbytes / spent / 1e3}

        for tokens in TOKENS:
            report.add(Line(shape, tokens, name, ran="eager"), partial(timed, tokens))
        del weights


def sizes_of(shape: str) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of every product."""
    hidden, inner, _, heads, kv_heads, vocab = SHAPES[shape]
    of_kv = hidden // heads * kv_heads
    return {
        "q or o": (hidden, hidden),
        "k or v": (hidden, of_kv),
        "gate or up": (hidden, inner),
        "down": (inner, hidden),
        "head": (hidden, vocab),
        "qkv": (hidden, hidden + 2 * of_kv),
        "gate and up": (hidden, 2 * inner),
    }


@torch.no_grad()
def main() -> None:
    """Measure, print a table, write the file."""
    shapes = ["8B"] if torch.cuda.is_available() else ["0.1B"]
    parser = shapes_parser(__doc__, shapes, context=1024, rounds=10)
    parser.add_argument("--nodes", type=common.numbers, default=[0, 15, 63])
    parser.add_argument("--products", action="store_true", help="time matrix products instead")
    options = common.parsed(parser)
    report = Report(options, device=options.device, dtype=options.dtype)
    for shape in options.shapes:
        if options.products:
            products(report, shape, options)
            continue
        device, dtype = torch.device(options.device), getattr(torch, options.dtype)
        bench = Bench(load(shape, options.model, dtype, device), 1, options.context, rounds=1)
        for nodes in options.nodes:
            report.add(Line(shape, 1 + nodes), partial(launches, bench, nodes))
    report.end()


if __name__ == "__main__":
    main()
