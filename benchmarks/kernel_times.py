"""Time every kernel against its torch twin, a plain torch version, and the memory it must move.

The plain version of verification is what assisted decoding in transformers does with the logits of
a chain; the others are what one would write with torch alone. `floor` is the time that a large copy
of the same run would take for the bytes that a case must read and write. On a GPU, `call` is a call
from Python and `graph` the same work replayed as a CUDA graph. Every call takes other inputs until
three times the L2 cache has been read (`--rotate`), as a forward lies between two calls of a step.
The twin of attention is attention under a mask, which a model falls back to; `bits` is whether the
first token of a block has the bits that it has in a block of one. Times are the fastest of
`--rounds`.

    python benchmarks/kernel_times.py --json kernels.json
    python benchmarks/kernel_times.py --device cpu --vocab 49152 --only verify_greedy
    python benchmarks/kernel_times.py --nodes 15,63 --context 512,32768 --rows 1,8 --only attention
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import common
import torch
from common import Report
from kernel_cases import Bench, Case


@dataclass(frozen=True)
class Line:
    """One line of the result, in microseconds; None where a system does not run here."""

    name: str
    rows: int
    nodes: int
    context: int
    floor: float | None = None
    graph: float | None = None
    call: float | None = None
    twin: float | None = None
    plain: float | None = None
    bits: bool | None = None
    ran: str = ""


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


def on_backend(name: str) -> Any:
    """Run Triton's kernels, or their twins, inside."""
    return patch.dict(os.environ, LOOKAHEAD_HF_BACKEND=name)


def timed(bench: Bench, case: Case, *names: str) -> dict[str, float]:
    """Microseconds of a call of each function of a case, with other inputs each time.

    `graph` is `ours` replayed as a CUDA graph, and `call` is `ours` itself.
    """
    functions = {"call": case.ours, "graph": case.ours, "plain": case.plain}
    functions["twin"] = case.fallback or case.ours
    found = {}
    for name in names:
        work: Any = partial(_all_copies, functions[name], case.copies)
        work = _as_graph(work) if name == "graph" else work
        found[name] = microseconds(work, bench.device, bench.options.rounds) / case.copies
    return found


def _all_copies(work: Callable[[int], Any], copies: int) -> None:
    for copy in range(copies):
        work(copy)


def measure(bench: Bench, kind: str, per_microsecond: float) -> dict[str, Any]:
    """Time one case: the kernel where Triton runs, its twin, and the plain version."""
    case, on_gpu = getattr(bench, kind)(), bench.device.type == "cuda"
    found = {"name": case.name, "floor": case.num_bytes / per_microsecond, "ran": "twin"}
    if on_gpu or os.environ.get("TRITON_INTERPRET") == "1":
        with on_backend("triton"):
            found["bits"] = case.bits and case.bits()
            if on_gpu:
                found |= timed(bench, case, "call", "graph") | {"ran": "kernel and twin"}
    with on_backend("torch"):
        return found | timed(bench, case, "twin", "plain")


def arguments() -> argparse.Namespace:
    """The command line; the GPU's defaults are a model of 8B at 32k tokens with 63 drafted."""
    sizes = {"vocab": 151936, "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128}
    parser = common.parser(__doc__, **sizes, top_k=48, rounds=20)
    parser.set_defaults(dtype="bfloat16")
    contexts = [32768 if torch.cuda.is_available() else 2048]
    for name, default in {"rows": [1], "nodes": [63], "context": contexts}.items():
        parser.add_argument(f"--{name}", type=common.numbers, default=default)
    parser.add_argument("--rotate", type=int, help="MB of inputs (default: on a GPU 3 x its L2)")
    parser.add_argument("--only", type=common.words, help="functions of `Bench`")
    tiny = {"vocab": 101, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "top_k": 4}
    return common.parsed(parser, **tiny, context=[64])


def each_place(
    measure: Callable[[Report, Bench, Line, float], None], may_fail: bool = False
) -> None:
    """Measure with the options of the command line, print a table, write the file."""
    options = arguments()
    torch.manual_seed(0)
    device = torch.device(options.device)
    per_microsecond = bandwidth(device, options.rounds)
    about = {name: str(value) for name, value in vars(options).items()}
    report = Report(options, **about, gigabytes_per_second=per_microsecond / 1e3)
    for rows, nodes, context in product(options.rows, options.nodes, options.context):
        place = {"rows": rows, "nodes": nodes, "context": context}
        of_place = argparse.Namespace(**(vars(options) | place))
        bench = Bench(of_place, rotated(device, options.rotate))
        measure(report, bench, Line("", **place), per_microsecond)
    report.end(may_fail)


def every_kind(report: Report, bench: Bench, line: Line, per_microsecond: float) -> None:
    """Add a line for every kind of case."""
    for kind in bench.options.only or bench.kinds:
        work = partial(measure, bench, kind, per_microsecond)
        report.add(replace(line, name=kind), work)


def main() -> None:
    each_place(every_kind)


if __name__ == "__main__":
    main()
