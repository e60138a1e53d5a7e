"""Ahead-of-time compilation of every kernel for GPUs that need not be present.

What is compiled is what runs: the functions that launch the kernels are called with tensors without
memory, as a step calls them, and Triton itself specialises each launch by its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from lookahead_hf.kernels import attention, compact, reject, topk, verify
from lookahead_hf.kernels._attention_sizes import stages
from lookahead_hf.kernels.path_table import PathTable


class Gpu(NamedTuple):
    """A GPU to compile for, and the shared memory that a program may use there."""

    target: GPUTarget
    shared_bytes: int


GPUS = {
    "sm_80": Gpu(GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": Gpu(GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": Gpu(GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": Gpu(GPUTarget("hip", "gfx942", 64), 64 * 1024),
    "sm_86": Gpu(GPUTarget("cuda", 86, 32), 99 * 1024),
    "sm_120": Gpu(GPUTarget("cuda", 120, 32), 99 * 1024),
}


def _empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _verify(nodes: int, vocab: int, dtype: torch.dtype, sampled: bool = False) -> None:
    """A step's verification; where it is not sampled, the best entries of its logits as well."""
    rows, width = 2, 1 + nodes
    scores = _empty(rows, width, vocab, dtype=dtype)
    tree = _empty(rows, width), _empty(rows, width), _empty(rows)
    if sampled:
        noise = _empty(rows, 12, vocab, dtype=torch.float32)
        verify.verify_tree(scores, *tree, noise, _empty(rows, width))
        return
    walk = verify.verify_tree(scores, *tree, keep_scan=True)
    topk.topk_rows(scores.flatten(0, 1), 48, walk.scan)


def _topk(vocab: int, k: int, dtype: torch.dtype) -> None:
    topk.topk_rows(_empty(64, vocab, dtype=dtype), k)


def _reject(nodes: int, vocab: int) -> None:
    rows, width = 2, 1 + nodes
    probs = _empty(rows, width, vocab, dtype=torch.float32)
    uniforms = _empty(rows, nodes, dtype=torch.float32)
    tree = _empty(rows, width), _empty(rows, width), _empty(rows)
    reject.reject_tree(probs, probs[:, 1:], *tree, uniforms, probs[:, 0])


def _compact(width: int, dim: int) -> None:
    layers = [_empty(2, 4096, 8, dim, dtype=torch.bfloat16) for _ in range(2)]
    compact.compact_path(PathTable(layers), _empty(2), _empty(2, width), _empty(2))


def _attend(
    nodes: int,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    extras: bool = False,
) -> None:
    """Attention of one layer; `heads` are those of the queries and those of K and V."""
    q = _empty(2, nodes, heads[0], dim, dtype=dtype).transpose(1, 2)
    k = _empty(2, 4096, heads[1], dim, dtype=dtype).transpose(1, 2)
    given = q, k, k, _empty(2), _empty(2, nodes), dim**-0.5
    if not extras:
        attention.tree_attention(*given)
        return
    attention.tree_attention(
        *given,
        window=1024,
        columns=_empty(2, 4096),
        pads=_empty(2),
        softcap=50.0,
        sinks=_empty(heads[0], dtype=dtype),
    )


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
}
"""What is printed of each use, and the use.

Vocabularies that divide by 16 and one that does not, drafts of 63 nodes and fewer, the three types
of logits, one and two tokens' words in the cache's layout, and heads of all sizes and groupings.
"""


class Launch(NamedTuple):
    """One kernel with the types and constants of one use; options are warps, stages and so on."""

    name: str
    source: ASTSource
    options: dict[str, Any]


def launches(gpu: Gpu) -> list[Launch]:
    """Return what all cases launch on a GPU, each compiled form once."""
    major = gpu.target.arch // 10 if gpu.target.backend == "cuda" else 0
    backend = make_backend(gpu.target)
    found: dict[str, Launch] = {}
    with patch.object(attention, "num_stages", lambda _, dim: stages(dim, major)):
        for case, run in CASES.items():
            with _noted() as seen:
                run()
            for kernel, arguments in seen:
                launch = _launch(case, kernel, arguments, backend)
                parts = launch.source.signature, launch.source.constants, launch.source.attrs
                found.setdefault(repr((kernel.fn.__name__, *parts, launch.options)), launch)
    return list(found.values())


@contextmanager
def _noted() -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Yield the kernels that are called and their arguments; nothing is launched."""
    seen: list[tuple[Any, dict[str, Any]]] = []

    def note(kernel: Any, *, grid: Any, warmup: bool, **arguments: Any) -> None:
        seen.append((kernel, arguments))

    with patch.object(JITFunction, "run", note):
        yield seen


def _launch(case: str, kernel: Any, arguments: dict[str, Any], backend: Any) -> Launch:
    """Specialise a call by its arguments, as Triton does when it launches."""
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    _, specialised, _ = bind(**arguments, debug=False)
    names = [parameter.name for parameter in kernel.params]
    kinds = [kind for kind, _ in specialised]
    fixed = {name for name, kind in zip(names, kinds, strict=True) if kind == "constexpr"}
    source = ASTSource(
        fn=kernel,
        signature=dict(zip(names, kinds, strict=True)),
        constexprs={name: arguments[name] for name in names if name in fixed},
        attrs={
            (index,): backend.parse_attr(key)
            for index, (kind, key) in enumerate(specialised)
            if kind != "constexpr" and isinstance(key, str)
        },
    )
    options = {name: value for name, value in arguments.items() if name not in names}
    return Launch(
        f"{kernel.fn.__name__.strip('_').removesuffix('_kernel')}: {case}", source, options
    )


def compile_launch(launch: Launch, gpu: Gpu) -> int:
    """Compile one kernel for one GPU; return the bytes of shared memory that a program takes.

    Raises:
        RuntimeError: The kernel needs more shared memory than the GPU has; its launch would fail.
    """
    compiled = triton.compile(launch.source, target=gpu.target, options=launch.options)
    shared: int = compiled.metadata.shared
    if shared > gpu.shared_bytes:
        raise RuntimeError(
            f"needs {shared} bytes of shared memory, the target has {gpu.shared_bytes}"
        )
    return shared
