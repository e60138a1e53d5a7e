"""Ahead-of-time compilation of every kernel for GPUs that need not be present."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lookahead_hf.kernels import attention, compact, reject, tiles, topk, verify
from lookahead_hf.kernels._attention_sizes import tile_sizes
from lookahead_hf.kernels._common import FP_FUSION


@dataclass(frozen=True)
class Target:
    """A GPU to compile for.

    Attributes:
        gpu: Triton's name for it.
        shared_bytes: Shared memory that a program may use there.
        stages: Stages in which attention runs there, see `_attention_sizes.num_stages`.
    """

    gpu: GPUTarget
    shared_bytes: int
    stages: int


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 * 1024, 2),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 * 1024, 3),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 * 1024, 3),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 * 1024, 2),
}


@dataclass(frozen=True)
class Variant:
    """One kernel with the types and constants of one use.

    Attributes:
        name: What it is printed as.
        kernel: The decorated function.
        pointers: Element type of each pointer argument, in Triton's notation without the asterisk.
        constants: Values of the constexpr arguments.
        num_warps: As in the launch.
        max_stages: Stages of a loop over tiles, where the target does not ask for fewer.
        floats: Arguments that are float32 numbers; the other numbers are integers.
    """

    name: str
    kernel: Any
    pointers: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    max_stages: int = 3
    floats: tuple[str, ...] = ()

    def source(self) -> ASTSource:
        """What Triton compiles; pointers, strides and vocabulary divide by 16, as is usual."""
        signature = {name: self._type(name) for name in self.kernel.arg_names}
        attributes = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(self.kernel.arg_names)
            if name.endswith("_ptr") or "stride" in name or name == "vocab"
        }
        return ASTSource(
            fn=self.kernel, signature=signature, constexprs=self.constants, attrs=attributes
        )

    def _type(self, name: str) -> str:
        if name in self.constants:
            return "constexpr"
        if name in self.pointers:
            return "*" + self.pointers[name]
        if name in self.floats:
            return "fp32"
        return "i64" if "stride" in name else "i32"


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes; None where the tools do not say."""

    registers: int | None
    shared_bytes: int
    spills: int | None


def compile_variant(variant: Variant, target: Target) -> Resources:
    """Compile one kernel for one target.

    Raises:
        RuntimeError: It compiles, but needs more shared memory than the target has, which would
            fail at launch.
    """
    options = {
        "num_warps": variant.num_warps,
        "num_stages": min(variant.max_stages, target.stages),
        "enable_fp_fusion": FP_FUSION,
    }
    compiled = triton.compile(variant.source(), target=target.gpu, options=options)
    if compiled.metadata.shared > target.shared_bytes:
        raise RuntimeError(
            f"needs {compiled.metadata.shared} bytes of shared memory, "
            f"the target has {target.shared_bytes}"
        )
    usage = _nvidia_usage if target.gpu.backend == "cuda" else _amd_usage
    registers, spills = usage(compiled.asm)
    return Resources(registers, compiled.metadata.shared, spills)


def _nvidia_usage(asm: dict[str, Any]) -> tuple[int | None, int | None]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        report = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=False
        )
    text = report.stdout + report.stderr
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text)


def _amd_usage(asm: dict[str, Any]) -> tuple[int | None, int | None]:
    return (
        _number(r"\.vgpr_count:\s+(\d+)", asm["amdgcn"]),
        _number(r"\.vgpr_spill_count:\s+(\d+)", asm["amdgcn"]),
    )


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found else None


def variants() -> Iterator[Variant]:
    """Every kernel in the shapes of a model with 152k tokens and 64 nodes."""
    tree = dict.fromkeys(["depth_ptr", "num_nodes_ptr", "tokens_ptr", "parents_ptr"], "i64")
    for dtype in ("bf16", "fp32"):
        yield Variant(
            f"tile_best {dtype}",
            tiles._tile_best_kernel,
            {"best_ptr": "i64", "scores_ptr": dtype, "noise_ptr": "fp32", **tree},
            {"HAS_COUNT": True, "HAS_NOISE": dtype == "fp32", "BLOCK": 2048},
            num_warps=4,
        )
    for nodes in (16, 64):
        yield Variant(
            f"walk nodes={nodes}",
            verify._walk_kernel,
            {"packed_ptr": "i64", "best_ptr": "i64", "tiles_ptr": "i64", **tree},
            {"NODES": nodes, "TILES": 128},
            num_warps=8,
        )
    floats = ["left_ptr", "probs_ptr", "draft_ptr", "uniforms_ptr", "noise_ptr"]
    yield Variant(
        "reject nodes=64",
        reject._reject_kernel,
        {"packed_ptr": "i64", **tree, **dict.fromkeys(floats, "fp32")},
        {"NODES": 64, "BLOCK": 4096},
        num_warps=8,
    )
    for k, block, num_tiles, warps in ((8, 1024, 256, 8), (64, 256, 1024, 16)):
        yield Variant(
            f"topk k={k}",
            topk._topk_kernel,
            {"values_ptr": "fp32", "ids_ptr": "i64", "logits_ptr": "bf16", "tiles_ptr": "i64"},
            {"K": k, "BLOCK": block, "TILES": num_tiles},
            num_warps=warps,
        )
    indices = dict.fromkeys(["table_ptr", "lengths_ptr", "path_ptr", "num_kept_ptr"], "i64")
    for aligned in (True, False):
        yield Variant(
            f"compact_path aligned={aligned}",
            compact._compact_path_kernel,
            indices,
            {"WORD": tl.int32, "ALIGNED": aligned, "PATH": 64, "BLOCK": 128},
            num_warps=4,
        )
    yield from _attention_variants()


def _attention_variants() -> Iterator[Variant]:
    """Groups of 7 heads, as in Qwen2.5-7B, in all head sizes; windows, sinks and so on in one."""
    for dtype, dim, nodes, extras in (
        (torch.bfloat16, 64, 64, False),
        (torch.bfloat16, 128, 64, False),
        (torch.bfloat16, 128, 64, True),
        (torch.bfloat16, 128, 1, False),
        (torch.bfloat16, 256, 64, False),
        (torch.float32, 128, 64, False),
    ):
        of_model = "fp32" if dtype == torch.float32 else "bf16"
        pointers = {
            **dict.fromkeys(["out_ptr", "q_ptr", "k_ptr", "v_ptr", "sinks_ptr"], of_model),
            **dict.fromkeys(["acc_ptr", "stats_ptr"], "fp32"),
            **dict.fromkeys(["lengths_ptr", "ancestors_ptr", "columns_ptr", "pads_ptr"], "i64"),
        }
        constants = {
            **dict.fromkeys(["DIM", "DIM_V", "BLOCK_D", "BLOCK_V"], dim),
            **dict.fromkeys(["WINDOW", "COLUMNS", "SOFTCAP"], extras),
            **tile_sizes(nodes * 7, dim, dtype),
            "GROUP": 7,
        }
        name = f"{of_model} {dim} nodes={nodes}{' window softcap sinks' if extras else ''}"
        floats = "scale", "softcap"
        yield Variant(
            f"attention prefix {name}",
            attention._prefix_kernel,
            pointers,
            constants,
            max_stages=3 if dim <= 128 else 2,
            floats=floats,
        )
        yield Variant(
            f"attention node {name}",
            attention._node_kernel,
            pointers,
            {**constants, "SINKS": extras, "QUERIES": 16},
            max_stages=1,
            floats=floats,
        )
