"""Time every kernel against its torch twin, a plain torch version, and the memory it must move.

The plain version of verification is what assisted decoding in transformers does with the logits of
a chain; the others are what one would write with torch alone. `floor` is the time that a large copy
of the same run would take for the bytes that a case must read and write. On a GPU, `call` is a call
from Python and `graph` the same work replayed as a CUDA graph. Every call takes other inputs until
three times the L2 cache has been read (`--rotate`), as a forward lies between two calls of a step.
The twin of attention is attention under a mask, which a model falls back to. Times are the fastest
of `--rounds`.

    python benchmarks/kernels.py --json kernels.json --plot kernels.svg
    python benchmarks/kernels.py --device cpu --dtype float32 --vocab 49152 --only verify
    python benchmarks/kernels.py --nodes 15 --context 2048 --rows 8
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kernel_cases import Case


@dataclass(frozen=True)
class Line:
    """One line of the result, in microseconds; None where a system does not run here."""

    name: str
    floor: float
    graph: float | None
    call: float | None
    twin: float
    plain: float


def bandwidth(device: torch.device, rounds: int) -> float:
    """Bytes per microsecond of a large copy, reads and writes counted."""
    size = 2**28 if device.type == "cuda" else 2**26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / microseconds(lambda: target.copy_(source), device, rounds)


def microseconds(work: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """Fastest of some rounds, each long enough for the clock."""
    work()
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    repeats = max(1, int(2e-3 / (time.perf_counter() - start)))
    fastest = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        wait(device)
        fastest = min(fastest, (time.perf_counter() - start) / repeats)
    return fastest * 1e6


def rotated(device: torch.device, megabytes: int | None) -> int:
    """Bytes of inputs after which one set may come again, as none of it is in a cache by then."""
    if megabytes is not None:
        return megabytes * 2**20
    if device.type != "cuda":
        return 0
    return 3 * int(torch.cuda.get_device_properties(device).L2_cache_size)


def wait(device: torch.device) -> None:
    """Wait for what a device was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _as_graph(work: Callable[[], Any]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph.replay


def measure(case: Case, device: torch.device, per_microsecond: float, rounds: int) -> Line:
    """Time one case: the kernel where Triton runs, its twin, and the plain version."""

    def all_of(work: Callable[[int], Any]) -> Callable[[], None]:
        def run() -> None:
            for copy in range(case.copies):
                work(copy)

        return run

    def one(work: Callable[[], Any]) -> float:
        return microseconds(work, device, rounds) / case.copies

    call = graph = None
    if device.type == "cuda":
        os.environ["LOOKAHEAD_HF_BACKEND"] = "triton"
        call, graph = one(all_of(case.ours)), one(_as_graph(all_of(case.ours)))
    os.environ["LOOKAHEAD_HF_BACKEND"] = "torch"
    floor = case.num_bytes / per_microsecond
    twin, plain = one(all_of(case.fallback or case.ours)), one(all_of(case.plain))
    return Line(case.name, floor, graph, call, twin, plain)


def plot(lines: list[Line], path: Path) -> None:
    """Bars of every case's times, on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    systems = [s for s in ("floor", "graph", "call", "twin", "plain") if getattr(lines[0], s)]
    for place, system in enumerate(systems):
        at = [index + 0.8 * (place + 0.5) / len(systems) - 0.4 for index in range(len(lines))]
        axis.bar(at, [getattr(line, system) for line in lines], 0.8 / len(systems), label=system)
    axis.set(yscale="log", ylabel="microseconds")
    axis.set_xticks(range(len(lines)), [line.name for line in lines], rotation=15)
    axis.legend()
    figure.savefig(path)


def arguments() -> argparse.Namespace:
    """The command line; the GPU's defaults are a model of 8B at 32k tokens with 63 drafted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    numbers = {"rows": 1, "nodes": 63, "vocab": 151936, "context": 32768 if cuda else 2048}
    numbers |= {"layers": 32, "heads": 32, "kv-heads": 8, "head-dim": 128, "top-k": 48}
    numbers |= {"rounds": 20}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rotate", type=int, help="MB of inputs (default: on a GPU 3 x its L2)")
    parser.add_argument("--threads", type=int, help="threads of torch on a CPU")
    parser.add_argument("--only", default="", help="only kernels whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--plot", type=Path, help="also write a figure (needs matplotlib)")
    options = parser.parse_args()
    if options.nodes not in range(1, 64):
        parser.error(f"--nodes is {options.nodes}: tree_attention takes 1 to 63 drafted nodes")
    return options


def main() -> None:
    """Measure, print a table, write the files."""
    # Not above: transformers, which it imports, tries to import a package of this file's name.
    from kernel_cases import Bench

    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device(options.device)
    per_microsecond = bandwidth(device, options.rounds)
    print(f"{options.dtype}, {device}, {per_microsecond / 1e3:.1f} GB/s; microseconds per call")
    print(f"{'':36}{'floor':>10}{'graph':>10}{'call':>10}{'twin':>10}{'plain':>10}")
    lines = []
    for case in Bench(options, rotated(device, options.rotate)).cases():
        if options.only not in case.name:
            continue
        line = measure(case, device, per_microsecond, options.rounds)
        lines.append(line)
        times = line.floor, line.graph, line.call, line.twin, line.plain
        shown = ["-" if value is None else f"{value:.1f}" for value in times]
        print(f"{line.name:36}" + "".join(f"{text:>10}" for text in shown), flush=True)
    if options.json:
        given = {name: str(value) for name, value in vars(options).items()}
        report = {"options": given, "gigabytes_per_second": per_microsecond / 1e3}
        report |= {"torch": torch.__version__, "lines": [asdict(line) for line in lines]}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot and lines:
        plot(lines, options.plot)


if __name__ == "__main__":
    main()
