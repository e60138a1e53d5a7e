"""Ahead-of-time compilation: the kernels compile for GPUs that are not there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own: what was decorated for the interpreter cannot be compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize(
    "target",
    [
        "sm_90",
        "gfx942",
        pytest.param("sm_80", marks=pytest.mark.slow),
        pytest.param("sm_100", marks=pytest.mark.slow),
    ],
)
def test_every_kernel_compiles(target: str) -> None:
    done = run("-m", "lookahead_hf.kernels", "compile", "--target", target)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == "0 failures"
    for kernel in ("tile_best", "walk", "reject", "topk", "compact_path", "attention"):
        assert any(kernel in line and "registers" in line for line in lines)


def test_failures_are_counted() -> None:
    """A kernel that would not launch for want of shared memory is a failure."""
    done = run(
        "-c",
        "from dataclasses import replace\n"
        "from lookahead_hf.kernels import aot, __main__\n"
        "aot.TARGETS['small'] = replace(aot.TARGETS['sm_90'], shared_bytes=1)\n"
        "raise SystemExit(__main__._compile(['small'], 'walk nodes=16'))\n",
    )
    assert done.returncode == 1, done.stderr
    assert "FAILED RuntimeError: needs 256 bytes of shared memory, the target has 1" in done.stdout
    assert done.stdout.endswith("1 failures\n")


def test_unknown_target() -> None:
    done = run("-m", "lookahead_hf.kernels", "compile", "--target", "sm_10")
    assert done.returncode == 2
    assert "no target sm_10: choose from sm_80, sm_90, sm_100, gfx942" in done.stderr


def test_compaction_loads_before_it_stores() -> None:
    """Programs of the interpreter run one thread, so only the compiled code can show the order."""
    done = run(
        "-c",
        "import triton\n"
        "from lookahead_hf.kernels import aot\n"
        "variant = next(v for v in aot.variants() if v.name == 'compact_path aligned=True')\n"
        "target = aot.TARGETS['sm_90'].gpu\n"
        "print(triton.compile(variant.source(), target, {'num_warps': 4}).asm['ptx'])\n",
    )
    loads, _, stores = done.stdout.partition("bar.sync")
    assert loads.count("ld.global.v4") == stores.count("st.global.v4") > 0
    assert "st.global" not in loads
    assert "ld.global.v4" not in stores
