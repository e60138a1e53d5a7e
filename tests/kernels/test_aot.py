"""Ahead-of-time compilation: the kernels compile for GPUs that are not there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

KERNELS = ("tile_best", "walk", "reject", "topk", "compact_path", "prefix", "node")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own: what was decorated for the interpreter cannot be compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize(
    "targets",
    ["sm_80 sm_90 sm_100 gfx942", pytest.param("sm_86 sm_120", marks=pytest.mark.slow)],
)
def test_every_kernel_compiles(targets: str) -> None:
    done = run("-m", "lookahead_hf.kernels", "compile", "--target", *targets.split())
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == "0 failures"
    for target in targets.split():
        what = "registers spilled" if target == "gfx942" else "bytes stack"
        for kernel in KERNELS:
            of_kernel = [line for line in lines if line.startswith(kernel) and target in line]
            assert of_kernel
            assert all("registers" in line and line.endswith(what) for line in of_kernel)


def test_failures_are_counted() -> None:
    """A kernel that would not launch for want of shared memory is a failure."""
    done = run(
        "-c",
        "from dataclasses import replace\n"
        "from lookahead_hf.kernels import aot, __main__\n"
        "aot.TARGETS['small'] = replace(aot.TARGETS['sm_90'], shared_bytes=1)\n"
        "raise SystemExit(__main__._compile(['small'], 'walk: 15 nodes', 1))\n",
    )
    assert done.returncode == 1, done.stderr
    assert "FAILED RuntimeError: needs " in done.stdout
    assert "bytes of shared memory, the target has 1" in done.stdout
    assert done.stdout.endswith("1 failures\n")


def test_what_is_compiled_is_what_runs() -> None:
    """Triton's own binder specialises the arguments of every launch in the same way."""
    done = run(
        "-c",
        "from triton.compiler import make_backend\n"
        "from triton.runtime.jit import create_function_from_signature\n"
        "from lookahead_hf.kernels import aot, aot_cases\n"
        "backend, count = make_backend(aot.TARGETS['sm_90'].gpu), 0\n"
        "for case, call in aot_cases.CASES.items():\n"
        "    with aot._noted() as seen:\n"
        "        call()\n"
        "    for kernel, arguments in seen:\n"
        "        ours = aot._launch(case, kernel, arguments)\n"
        "        bind = create_function_from_signature(kernel.signature, kernel.params, backend)\n"
        "        _, theirs, _ = bind(**arguments, debug=False)\n"
        "        kinds = [kind for kind, _ in theirs]\n"
        "        assert list(ours.signature.values()) == kinds, (ours.signature, kinds)\n"
        "        divisible = tuple(i for i, (_, key) in enumerate(theirs) if key == 'D')\n"
        "        assert ours.divisible == divisible, (ours.name, ours.divisible, divisible)\n"
        "        count += 1\n"
        "print(count)\n",
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 15


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
        "target = aot.TARGETS['sm_90']\n"
        "launches = {launch.name: launch for launch in aot.launches(target)}\n"
        "source = launches['compact_path: 64 tokens, whole words'].source()\n"
        "print(triton.compile(source, target.gpu, {'num_warps': 4}).asm['ptx'])\n",
    )
    loads, _, stores = done.stdout.partition("bar.sync")
    assert loads.count("ld.global.v4") == stores.count("st.global.v4") > 0
    assert "st.global" not in loads
    assert "ld.global.v4" not in stores
