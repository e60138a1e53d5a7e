"""Ahead-of-time compilation of every kernel for GPUs that need not be present.

What is compiled is what runs: the functions that launch the kernels are called with tensors without
memory (`aot_cases.py`), and each launch is noted as Triton would specialise it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from lookahead_hf.kernels import attention
from lookahead_hf.kernels._attention_sizes import stages
from lookahead_hf.kernels.aot_cases import CASES


@dataclass(frozen=True)
class Runner:
    """A GPU to compile for.

    Attributes:
        gpu: Triton's name for it.
        shared_bytes: Shared memory that a program may use there.
    """

    gpu: GPUTarget
    shared_bytes: int


TARGETS = {
    "sm_80": Runner(GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": Runner(GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": Runner(GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": Runner(GPUTarget("hip", "gfx942", 64), 64 * 1024),
    "sm_86": Runner(GPUTarget("cuda", 86, 32), 99 * 1024),
    "sm_120": Runner(GPUTarget("cuda", 120, 32), 99 * 1024),
}


@dataclass(frozen=True)
class Launch:
    """One kernel with the types and constants of one use.

    Attributes:
        name: What it is printed as.
        kernel: The decorated function.
        signature: Triton's type of every argument.
        constants: Values of those arguments that are compiled in.
        divisible: Indexes of the arguments that are known to divide by 16.
        options: Warps, stages and so on.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[int, ...]
    options: dict[str, Any]

    def source(self) -> ASTSource:
        """What Triton compiles."""
        return ASTSource(
            fn=self.kernel,
            signature=self.signature,
            constexprs=self.constants,
            attrs={(index,): [["tt.divisibility", 16]] for index in self.divisible},
        )


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes; None where the tools do not say.

    Attributes:
        registers: Per thread, on AMD vector registers.
        shared_bytes: Per program.
        stack_bytes: Per thread, what is spilled included, on NVIDIA.
        spilled: Vector registers that are, on AMD.
    """

    registers: int | None
    shared_bytes: int
    stack_bytes: int | None = None
    spilled: int | None = None


def launches(target: Runner) -> list[Launch]:
    """What all cases launch on a GPU of this kind, each compiled form once."""
    major = target.gpu.arch // 10 if target.gpu.backend == "cuda" else 0
    found: dict[str, Launch] = {}
    with patch.object(attention, "num_stages", lambda _, dim: stages(dim, major)):
        for case, run in CASES.items():
            with _noted() as seen:
                run()
            for kernel, arguments in seen:
                launch = _launch(case, kernel, arguments)
                found.setdefault(repr((kernel.fn.__name__, *_form(launch))), launch)
    return list(found.values())


def _form(launch: Launch) -> tuple[Any, ...]:
    return launch.signature, launch.constants, launch.divisible, launch.options


@contextmanager
def _noted() -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Nothing is launched; yields what would have been, kernels and arguments."""
    seen: list[tuple[Any, dict[str, Any]]] = []

    def note(kernel: Any, *, grid: Any, warmup: bool, **arguments: Any) -> None:
        seen.append((kernel, arguments))

    with patch.object(JITFunction, "run", note):
        yield seen


def _launch(case: str, kernel: Any, arguments: dict[str, Any]) -> Launch:
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible = []
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        kind, divides = _specialised(value, parameter.do_not_specialize)
        if parameter.is_constexpr or kind == "constexpr":
            kind, divides = "constexpr", False
            constants[parameter.name] = value
        signature[parameter.name] = kind
        if divides:
            divisible.append(index)
    options = {name: value for name, value in arguments.items() if name not in signature}
    name = kernel.fn.__name__.strip("_").removesuffix("_kernel")
    return Launch(f"{name}: {case}", kernel, signature, constants, tuple(divisible), options)


_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def _specialised(value: Any, not_integers: bool) -> tuple[str, bool]:
    """Triton's type of an argument, and whether it is known to divide by 16."""
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype], value.data_ptr() % 16 == 0
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "constexpr", False
    if isinstance(value, float):
        return "fp32", False
    kind = "i32" if -(2**31) <= value < 2**31 else "i64"
    if not_integers:
        return kind, False
    return ("constexpr", False) if value == 1 else (kind, value % 16 == 0)


def compile_launch(launch: Launch, target: Runner) -> Resources:
    """Compile one kernel for one target.

    Raises:
        RuntimeError: It compiles, but needs more shared memory than the target has, which would
            fail at launch.
    """
    compiled = triton.compile(launch.source(), target=target.gpu, options=launch.options)
    shared: int = compiled.metadata.shared
    if shared > target.shared_bytes:
        raise RuntimeError(
            f"needs {shared} bytes of shared memory, the target has {target.shared_bytes}"
        )
    if target.gpu.backend == "cuda":
        usage = _cubin_usage(compiled.asm["cubin"])
        return Resources(
            _number(r"REG:(\d+)", usage), shared, stack_bytes=_number(r"STACK:(\d+)", usage)
        )
    assembly = compiled.asm["amdgcn"]
    return Resources(
        _number(r"\.vgpr_count:\s+(\d+)", assembly),
        shared,
        spilled=_number(r"\.vgpr_spill_count:\s+(\d+)", assembly),
    )


def _cubin_usage(cubin: bytes) -> str:
    """What NVIDIA's tool says of a compiled kernel, nothing where the tool is not there."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=False
        )
    return report.stdout + report.stderr


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found else None
