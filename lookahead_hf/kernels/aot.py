"""Ahead-of-time compilation of every kernel for GPUs that need not be present.

What is compiled is what runs: the functions that launch the kernels are called with tensors without
memory (`aot_cases.py`), and Triton itself specialises each launch by its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from lookahead_hf.kernels import attention
from lookahead_hf.kernels._attention_sizes import stages
from lookahead_hf.kernels.aot_cases import CASES


@dataclass(frozen=True)
class Gpu:
    """A GPU to compile for.

    Attributes:
        target: Triton's name for it.
        shared_bytes: Shared memory that a program may use there.
    """

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


@dataclass(frozen=True)
class Launch:
    """One kernel with the types and constants of one use.

    Attributes:
        name: What it is printed as.
        source: What Triton compiles.
        options: Warps, stages and so on.
    """

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
