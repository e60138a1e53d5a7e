"""Ahead-of-time compilation of every kernel for GPUs that need not be present.

`python -m tests.helpers.ahead_of_time [sm_90 gfx942 ...]` compiles for some GPUs, or for all. It
needs a process without TRITON_INTERPRET, since interpreted kernels cannot be compiled.

What is compiled is what runs: the functions that launch the kernels are called with tensors without
memory, as a step calls them, and Triton itself compiles each launch, as it does before the first.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from lookahead_hf.engines.cuda import graphs
from lookahead_hf.kernels import attention, topk
from lookahead_hf.kernels import tree as trees
from lookahead_hf.kernels.attention import stages
from lookahead_hf.kernels.data import PathTable, TopKCounts


class Gpu(NamedTuple):
    """A GPU to compile for.

    For want of registers, attention keeps `stack_bytes` per thread in memory, as Triton 3.9
    compiles it; on RDNA only with heads of more than 128 dimensions.
    """

    target: GPUTarget
    shared_bytes: int  # that a program may use
    stack_bytes: int = 0


GPUS = {
    "sm_80": Gpu(GPUTarget("cuda", 80, 32), 163 * 1024, 8),
    "sm_90": Gpu(GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": Gpu(GPUTarget("cuda", 100, 32), 227 * 1024, 8),
    "gfx942": Gpu(GPUTarget("hip", "gfx942", 64), 64 * 1024),
    "sm_86": Gpu(GPUTarget("cuda", 86, 32), 99 * 1024, 48),
    "sm_120": Gpu(GPUTarget("cuda", 120, 32), 99 * 1024, 88),
    "gfx90a": Gpu(GPUTarget("hip", "gfx90a", 64), 64 * 1024),
    "gfx1100": Gpu(GPUTarget("hip", "gfx1100", 32), 64 * 1024, 320),
}

WIDTHS = (1, 8, 16, 32, 64)  # Tokens per row of the steps that are captured


def _empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _step(rows: int, width: int, sampled: bool) -> None:
    """All launches of a step of a model of eight billion parameters, on short and long texts."""
    for slots in (512, 4096):
        _attend(width, (32, 8), 128, rows=rows, slots=slots)
    _verify(width - 1, 128256, torch.float32 if sampled else torch.bfloat16, sampled, rows)
    if width > 1:
        _compact(width, 128, rows)


def _verify(
    nodes: int, vocab: int, dtype: torch.dtype, sampled: bool = False, rows: int = 2
) -> None:
    """A step's verification, and the best entries of its logits."""
    width = 1 + nodes
    scores = _empty(rows, width, vocab, dtype=dtype)
    tree = _empty(rows, width), _empty(rows, width), _empty(rows)
    if sampled:
        noise = _empty(rows, 12, vocab, dtype=torch.float32)
        walk = trees.verify_tree(scores, *tree, noise, _empty(rows, width))
        scores = scores.to(torch.bfloat16)  # what is drawn from was made of them
    else:
        walk = trees.verify_tree(scores, *tree, keep_scan=True)
    topk.topk_rows(scores.flatten(0, 1), 48, walk.scan, TopKCounts(walk.packed, tree[2], 12))


def _topk(vocab: int, k: int, dtype: torch.dtype) -> None:
    topk.topk_rows(_empty(64, vocab, dtype=dtype), k)


def _reject(nodes: int, vocab: int) -> None:
    rows, width = 2, 1 + nodes
    probs = _empty(rows, width, vocab, dtype=torch.float32)
    uniforms = _empty(rows, nodes, dtype=torch.float32)
    tree = _empty(rows, width), _empty(rows, width), _empty(rows)
    trees.reject_tree(probs, probs[:, 1:], *tree, uniforms, probs[:, 0])


def _compact(width: int, dim: int, rows: int = 2) -> None:
    layers = [_empty(rows, 4096, 8, dim, dtype=torch.bfloat16) for _ in range(2)]
    path = _empty(rows, 2 + width)[:, 2:]  # as `TreeWalk.path` is
    trees.compact_path(PathTable(layers), _empty(rows), path, _empty(rows))


def _attend(
    nodes: int,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    extras: bool = False,
    *,
    rows: int = 2,
    slots: int = 4096,
    v_dim: int | None = None,
) -> None:
    """Attention of one layer; `heads` are those of the queries and those of K and V."""
    q = _empty(rows, nodes, heads[0], dim, dtype=dtype).transpose(1, 2)
    k = _empty(rows, slots, heads[1], dim, dtype=dtype).transpose(1, 2)
    v = _empty(rows, slots, heads[1], v_dim or dim, dtype=dtype).transpose(1, 2)
    columns, sinks = (_empty(rows, slots), _empty(rows)), _empty(heads[0], dtype=dtype)
    more = (1024, *columns, 50.0, sinks) if extras else ()
    attention.tree_attention(q, k, v, _empty(rows), _empty(rows, nodes), dim**-0.5, *more)


CASES: dict[str, Callable[[], None]] = {
    "63 nodes, 151936 bf16": partial(_verify, 63, 151936, torch.bfloat16),
    "15 nodes, 50257 fp16": partial(_verify, 15, 50257, torch.float16),
    "63 nodes sampled, 128256": partial(_verify, 63, 128256, torch.float32, sampled=True),
    "k=8, 32000 fp32": partial(_topk, 32000, 8, torch.float32),
    "15 drawn nodes, 151936": partial(_reject, 15, 151936),
    "64 tokens, whole words": partial(_compact, 64, 128),
    "65 tokens, odd heads": partial(_compact, 65, 81),
    "64 x 28/4 heads of 128 bf16": partial(_attend, 64, (28, 4), 128),
    "1 x 28/4 heads of 128 bf16": partial(_attend, 1, (28, 4), 128),
    "16 x 32/1 heads of 64 fp16, window softcap sinks": partial(
        _attend, 16, (32, 1), 64, torch.float16, extras=True
    ),
    "64 x 8/4 heads of 256 bf16": partial(_attend, 64, (8, 4), 256),
    "64 x 32/8 heads of 128 fp32": partial(_attend, 64, (32, 8), 128, torch.float32),
    **{
        f"{width} x 32/8 heads of {dim} and {v_dim} bf16": partial(
            _attend, width, (32, 8), dim, v_dim=v_dim
        )
        for (dim, v_dim), width in product(((80, 80), (96, 96), (192, 128)), (1, 64))
    },
    **{
        f"{rows} x {width}, {'sampled' if sampled else 'greedy'}": partial(
            _step, rows, width, sampled
        )
        for width, rows, sampled in product(WIDTHS, (1, 3), (False, True))
    },
}
"""What is printed of each use, and the use.

Steps of all widths, of one row and of several. Vocabularies that divide by 16 and one that does
not, drafts of 63 nodes and fewer, the three types of logits, one and two tokens' words in the
cache's layout, and heads of all sizes and groupings, also where K and V differ.
"""


def compile_case(case: str, gpu: Gpu) -> dict[str, CompiledKernel | Exception]:
    """Compile what a case launches on a GPU.

    Returns:
        What Triton made of each kernel, or why it cannot be launched: it does not compile, or it
        needs more shared memory or keeps more registers in memory than `Gpu` allows.
    """
    found: dict[str, CompiledKernel | Exception] = {}
    run = JITFunction.run

    def compile_launch(kernel: Any, *, warmup: bool, **arguments: Any) -> None:
        name = kernel.fn.__name__.strip("_").removesuffix("_kernel")
        if isinstance(found.get(name), Exception):
            return
        try:
            found[name] = made = run(kernel, warmup=True, **arguments)
            if made.metadata.shared > gpu.shared_bytes:
                raise RuntimeError(
                    f"needs {made.metadata.shared} bytes of shared memory, "
                    f"the target has {gpu.shared_bytes}"
                )
            if (used := resources(made)).stack_bytes > gpu.stack_bytes:
                raise RuntimeError(f"keeps {used.stack_bytes} bytes of registers in memory")
        except Exception as error:
            found[name] = error

    with patch.object(JITFunction, "run", compile_launch), _launches_on(gpu):
        CASES[case]()
    return found


@contextmanager
def _launches_on(gpu: Gpu) -> Iterator[None]:
    """Let launches find this GPU."""
    target = gpu.target
    major = target.arch // 10 if target.backend == "cuda" else 0
    is_rdna = target.backend == "hip" and target.warp_size == 32
    triton.runtime.driver.set_active(Driver(target))
    with (
        patch.object(attention, "num_stages", lambda _, dim: stages(dim, major)),
        patch.object(attention, "is_rdna", lambda _: is_rdna),
    ):
        yield


def count_variants(rows: int, sampled: bool, gpu: Gpu) -> int:
    """Count what Triton compiles for the steps of all widths."""
    found = set()

    def note(*, fn: Any, key: Any, **_: Any) -> bool:
        found.add((fn.name, str(key)))
        return True  # which leaves it uncompiled

    with patch.object(triton.knobs.runtime, "jit_cache_hook", note), _launches_on(gpu):
        for width in graphs.widths_for(rows):
            _step(rows, width, sampled)
    return len(found)


class Resources(NamedTuple):
    """What a thread of a kernel needs."""

    registers: int
    stack_bytes: int


def resources(made: CompiledKernel) -> Resources:
    """Read what a kernel needs from what it was compiled to."""
    if "amdgcn" in made.asm:
        return Resources(
            *(
                int(re.findall(rf"\.{name}:\s*(\d+)", made.asm["amdgcn"])[0])
                for name in ("vgpr_count", "private_segment_fixed_size")
            )
        )
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Resources(*(int(re.findall(rf"{name}:(\d+)", said)[0]) for name in ("REG", "STACK")))


class Driver:
    """Stands in for the driver of a GPU, which Triton asks what to compile for."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> GPUTarget:
        return self._target  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: GPUTarget) -> int:
        return 0


def main(targets: list[str]) -> int:
    """Compile every case for these GPUs, or for all; print each kernel; return 1 if one fails."""
    failures = 0
    with ProcessPoolExecutor() as pool:
        for lines in pool.map(_compile, product(targets or GPUS, CASES)):
            failures += sum("FAILED" in line for line in lines)
            print(*lines, sep="\n", flush=True)
    print(f"{failures} failures")
    return 1 if failures else 0


def _compile(job: tuple[str, str]) -> list[str]:
    """Compile the kernels of a case for a target; return what is printed of each."""
    target, case = job
    lines = []
    for kernel, made in compile_case(case, GPUS[target]).items():
        said = f"FAILED {type(made).__name__}: {made}"
        if not isinstance(made, Exception):
            registers = resources(made).registers
            said = f"{made.metadata.shared:>6} bytes shared, {registers:>3} registers"
        lines.append(f"{kernel + ': ' + case:64} {target:7} {said}")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
