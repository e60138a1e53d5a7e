"""Time every kernel against its torch twin, a plain torch version, and the memory it must move.

The plain version of verification is what assisted decoding in transformers does with the logits of
a chain; of the others, what one would write with torch alone. `floor` is the bytes that a case must
read and write, by the bandwidth of a large copy measured in the same run. On a GPU `call` is a call
from Python and `graph` the same work replayed as a CUDA graph. Times are the fastest of `--rounds`.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --device cpu --dtype float32 --vocab 49152 --only verify
    python benchmarks/kernels.py --nodes 63 --context 16384 --json kernels.json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from lookahead_hf import kernels


@dataclass(frozen=True)
class Case:
    """One kernel on one shape."""

    name: str
    num_bytes: int  # that must be read or written
    ours: Callable[[], Any]
    plain: Callable[[], Any]


@dataclass(frozen=True)
class Line:
    """One line of the result, in microseconds; None where a system does not run here."""

    name: str
    floor: float
    graph: float | None
    call: float | None
    twin: float
    plain: float


class Bench:
    """The tensors of one model's step: a chain of drafted tokens, half of which are accepted."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.dtype = getattr(torch, options.dtype)
        self.width = 1 + options.nodes
        shape = options.rows, self.width, options.vocab
        self.logits = torch.randn(shape, device=self.device).to(self.dtype)
        self.probs = self.logits.float().softmax(-1)
        self.tokens = self.logits.argmax(-1).roll(1, 1)
        self.tokens[:, self.width // 2 + 1 :] = 0
        self.parents = self._of_rows(torch.arange(-1, options.nodes))
        self.depth = self.parents + 1
        self.num_nodes = self._of_rows(torch.tensor(options.nodes))
        self.lengths = self._of_rows(torch.tensor(options.context))

    def _of_rows(self, values: torch.Tensor) -> torch.Tensor:
        shape = self.options.rows, *values.shape
        return values.to(self.device).expand(shape).contiguous()

    def cases(self) -> Iterator[Case]:
        """All cases, one after the other, so that their tensors need not stand side by side."""
        yield self.verify_greedy()
        yield self.verify_sampled()
        yield self.reject()
        yield self.topk()
        yield self.compact()
        yield self.attention()

    def verify_greedy(self) -> Case:
        def plain() -> int:
            chosen = self.logits.to(dtype=torch.float32, copy=True).argmax(-1)
            equal = self.tokens[:, 1:] == chosen[:, :-1]
            return int((~equal).cumsum(-1).lt(1).sum())

        def ours() -> Any:
            return kernels.verify_tree(self.logits, self.tokens, self.parents, self.num_nodes)

        return Case("verify_tree greedy", _num_bytes(self.logits), ours, plain)

    def verify_sampled(self) -> Case:
        noise = torch.empty_like(self.probs).exponential_()

        def plain() -> int:
            chosen = torch.multinomial(self.probs.flatten(0, 1), 1).view(self.tokens.shape)
            equal = self.tokens[:, 1:] == chosen[:, :-1]
            return int((~equal).cumsum(-1).lt(1).sum())

        def ours() -> Any:
            return kernels.verify_tree(
                self.probs, self.tokens, self.parents, self.num_nodes, noise, self.depth
            )

        return Case("verify_tree sampled", _num_bytes(self.probs, noise), ours, plain)

    def reject(self) -> Case:
        draft = self.probs[:, :-1].roll(1, 0).contiguous()
        uniforms = torch.rand(draft.shape[:2], device=self.device)
        noise = torch.empty_like(self.probs[:, 0]).exponential_()
        drafted = self.tokens[:, 1:, None]

        def plain() -> torch.Tensor:
            ratio = self.probs[:, :-1].gather(2, drafted) / draft.gather(2, drafted)
            kept = int((uniforms > ratio[..., 0]).cumsum(-1).lt(1).sum(-1).min())
            left = self.probs[:, kept]
            if kept < draft.shape[1]:
                left = (left - draft[:, kept]).clamp(min=0)
                left = left / left.sum(-1, keepdim=True).clamp(min=1e-9) + 1e-12
            return torch.multinomial(left, 1)

        def ours() -> Any:
            return kernels.reject_tree(
                self.probs, draft, self.tokens, self.parents, self.num_nodes, uniforms, noise
            )

        return Case("reject_tree", 4 * _num_bytes(noise), ours, plain)

    def topk(self) -> Case:
        rows = self.logits.flatten(0, 1)
        k = self.options.top_k
        return Case(
            f"topk_rows k={k}",
            _num_bytes(rows),
            lambda: kernels.topk_rows(rows, k),
            lambda: rows.topk(k, dim=1),
        )

    def compact(self) -> Case:
        o = self.options
        slots = o.context + self.width
        shape = o.rows, slots, o.kv_heads, o.head_dim
        layers = [
            torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2 * o.layers)
        ]
        table = kernels.PathTable(layers)
        moved = max(1, self.width // 4)
        path = self._of_rows(torch.tensor([0, *range(2, 2 + moved)]))
        kept = self._of_rows(torch.tensor(1 + moved))
        sources = o.context + path[0]
        targets = slice(o.context, o.context + 1 + moved)

        def plain() -> None:
            for layer in layers:
                layer[:, targets] = layer.index_select(1, sources)

        token_bytes = o.kv_heads * o.head_dim * self.logits.element_size()
        return Case(
            f"compact_path {moved} tokens",
            2 * moved * token_bytes * len(layers) * o.rows,
            lambda: kernels.compact_path(table, self.lengths, path, kept),
            plain,
        )

    def attention(self) -> Case:
        o = self.options
        slots = o.context + self.width
        q = torch.randn(o.rows, o.heads, self.width, o.head_dim, device=self.device).to(self.dtype)
        k, v = (
            torch.randn(o.rows, slots, o.kv_heads, o.head_dim, device=self.device)
            .to(self.dtype)
            .transpose(1, 2)
            for _ in range(2)
        )
        # A chain: all nodes up to a node are its ancestors. The 64th is the sign bit.
        words = [(1 << (node + 1)) - 1 if node < 63 else -1 for node in range(self.width)]
        ancestors = self._of_rows(torch.tensor(words))
        scale = o.head_dim**-0.5
        mask = torch.ones(self.width, slots, dtype=torch.bool, device=self.device).tril(o.context)
        group = o.heads // o.kv_heads

        def plain() -> torch.Tensor:
            keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
            return scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)

        return Case(
            f"tree_attention {o.context} keys",
            _num_bytes(q, q, k, v),
            lambda: kernels.tree_attention(q, k, v, self.lengths, ancestors, scale),
            plain,
        )


def _num_bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def bandwidth(device: torch.device, rounds: int) -> float:
    """Bytes per microsecond of a large copy, reads and writes counted."""
    size = 2**28 if device.type == "cuda" else 2**26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / microseconds(lambda: target.copy_(source), device, rounds)


def microseconds(work: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """Fastest of some rounds, each long enough for the clock."""
    work()
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    repeats = max(1, int(2e-3 / (time.perf_counter() - start)))
    fastest = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        _wait(device)
        fastest = min(fastest, (time.perf_counter() - start) / repeats)
    return fastest * 1e6


def _wait(device: torch.device) -> None:
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
    call = graph = None
    if device.type == "cuda":
        os.environ["LOOKAHEAD_HF_BACKEND"] = "triton"
        call = microseconds(case.ours, device, rounds)
        graph = microseconds(_as_graph(case.ours), device, rounds)
    os.environ["LOOKAHEAD_HF_BACKEND"] = "torch"
    twin = microseconds(case.ours, device, rounds)
    plain = microseconds(case.plain, device, rounds)
    return Line(case.name, case.num_bytes / per_microsecond, graph, call, twin, plain)


def arguments() -> argparse.Namespace:
    """The command line; defaults are Qwen2.5-7B with 15 drafted tokens."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    numbers = {"rows": 1, "nodes": 15, "vocab": 152064, "context": 2048, "layers": 28}
    numbers |= {"heads": 28, "kv-heads": 4, "head-dim": 128, "top-k": 8, "rounds": 20}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, help="threads of torch on a CPU")
    parser.add_argument("--only", default="", help="only kernels whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    if options.nodes not in range(1, 64):
        parser.error(f"--nodes is {options.nodes}: tree_attention takes 1 to 63 drafted nodes")
    return options


def main() -> None:
    """Measure, print a table, write the file."""
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device(options.device)
    per_microsecond = bandwidth(device, options.rounds)
    print(f"{options.dtype}, {device}, {per_microsecond / 1e3:.1f} GB/s; microseconds per call")
    print(f"{'':28}{'floor':>10}{'graph':>10}{'call':>10}{'twin':>10}{'plain':>10}")
    lines = []
    for case in Bench(options).cases():
        if options.only not in case.name:
            continue
        line = measure(case, device, per_microsecond, options.rounds)
        lines.append(line)
        times = line.floor, line.graph, line.call, line.twin, line.plain
        shown = ["-" if value is None else f"{value:.1f}" for value in times]
        print(f"{line.name:28}" + "".join(f"{text:>10}" for text in shown), flush=True)
    if options.json:
        given = {name: str(value) for name, value in vars(options).items()}
        report = {"options": given, "gigabytes_per_second": per_microsecond / 1e3}
        report |= {"torch": torch.__version__, "lines": [asdict(line) for line in lines]}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
