"""List what a device runs in one step of ours: every kernel with its launches and its time.

On a GPU the step is replayed as a CUDA graph, and what runs are kernels. On a CPU the same step is
run, and what is listed are torch's operations, also those that launch nothing. `products` instead
times the matrix products of the shape by the tokens that they take, each over several copies of its
weight, so that none stays in a cache.

    python benchmarks/launches.py --shapes 8B --nodes 0,15,63 --json launches.json
    python benchmarks/launches.py --shapes 8B --products --json products.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from kernels import microseconds
from step import SHAPES, Bench, load, shapes_parser
from torch.profiler import ProfilerActivity, profile

TOKENS = (1, 8, 16, 32, 64, 128, 256, 512)
"""Tokens of the products."""

COPIES = 4
"""Copies of a weight, which a product after the other reads."""


@dataclass(frozen=True)
class Line:
    """One kernel in one step, or one product: microseconds of all launches together."""

    shape: str
    name: str
    tokens: int
    launches: int
    microseconds: float
    gigabytes_per_second: float | None = None


def launches(shape: str, options: argparse.Namespace) -> Iterator[Line]:
    """Profile one step for every number of nodes, the costliest kernels first."""
    device = torch.device(options.device)
    model = load(shape, options.model, getattr(torch, options.dtype), device)
    bench = Bench(model, 1, options.context, rounds=1)
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    for nodes in options.nodes:
        on_gpu = device.type == "cuda"
        with bench.stepping(nodes, on_gpu, on_device=True) as step:
            step(), step()
            with profile(activities=[kind]) as seen:
                step()
        events = [
            (
                event.key,
                event.count,
                event.device_time_total if on_gpu else event.self_cpu_time_total,
            )
            for event in seen.key_averages()
        ]
        for name, count, spent in sorted(events, key=lambda event: -event[2]):
            if spent:
                yield Line(shape, name[:100], 1 + nodes, count, spent)


def products(shape: str, options: argparse.Namespace) -> Iterator[Line]:
    """Time the products of a layer and of the head, and of layers that read the same input."""
    hidden, inner, _, heads, kv_heads, vocab = SHAPES[shape]
    of_kv = hidden // heads * kv_heads
    sizes = {"q or o": (hidden, hidden), "k or v": (hidden, of_kv), "gate or up": (hidden, inner)}
    sizes |= {"down": (inner, hidden), "head": (hidden, vocab)}
    sizes |= {"qkv": (hidden, hidden + 2 * of_kv), "gate and up": (hidden, 2 * inner)}
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    for name, (inputs, outputs) in sizes.items():
        weights = [torch.randn(outputs, inputs, device=device).to(dtype) for _ in range(COPIES)]
        for tokens in TOKENS:
            x = torch.randn(tokens, inputs, device=device).to(dtype)

            def work(x: Any = x, weights: Any = weights) -> None:
                for weight in weights:
                    torch.nn.functional.linear(x, weight)

            spent = microseconds(work, device, options.rounds) / COPIES
            speed = weights[0].nbytes / spent / 1e3
            yield Line(shape, name, tokens, 1, spent, speed)
        del weights


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table, write the file."""
    parser = shapes_parser(__doc__, ["8B"] if torch.cuda.is_available() else ["0.1B"])
    parser.add_argument("--nodes", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--products", action="store_true", help="time matrix products instead")
    parser.add_argument("--json", type=Path, help="also write the lines to this file, as they come")
    parser.set_defaults(nodes=[0, 15, 63])
    options = parser.parse_args(argv)
    lines: list[Line] = []
    print("| shape | name | tokens | launches | us | GB/s |\n|---|---|---|---|---|---|")
    with torch.no_grad():
        for shape in options.shapes:
            for line in (products if options.products else launches)(shape, options):
                lines.append(line)
                speed = f"{line.gigabytes_per_second:.0f}" if line.gigabytes_per_second else ""
                print(
                    f"| {shape} | {line.name} | {line.tokens} | {line.launches} "
                    f"| {line.microseconds:.1f} | {speed} |",
                    flush=True,
                )
                if options.json:
                    report = {"torch": torch.__version__, "lines": [asdict(li) for li in lines]}
                    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
