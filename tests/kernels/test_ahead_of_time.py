"""Ahead-of-time compilation: the kernels compile for GPUs that are not there."""

from __future__ import annotations

from itertools import product

import pytest
import triton

from lookahead_hf.engines.cuda import graphs
from tests.helpers.ahead_of_time import CASES, WIDTHS
from tests.helpers.processes import run

TRITON = tuple(map(int, triton.__version__.split(".")[:2]))

MOST_REGISTERS = {
    "tile_best": 96,
    "walk": 192,
    "reject": 144,
    "topk": 128,
    # Triton 3.6 takes 194. With either number, two programs of its four warps share 65,536.
    "compact_path": 176 if TRITON >= (3, 9) else 208,
    "prefix": 256,
    "node": 256,
}
"""Registers of a thread on any GPU. More would leave room for fewer threads at a time."""


@pytest.mark.parametrize(
    "targets",
    [
        "sm_90",
        pytest.param("sm_80 sm_86 sm_100 sm_120 gfx90a gfx942 gfx1100", marks=pytest.mark.slow),
    ],
)
def test_every_kernel_compiles(targets: str) -> None:
    done = run("-m", "tests.helpers.ahead_of_time", *targets.split())
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == "0 failures"
    for target in targets.split():
        for kernel, most in MOST_REGISTERS.items():
            of_kernel = [line for line in lines if line.startswith(kernel) and target in line]
            assert of_kernel
            assert all(line.endswith("registers") for line in of_kernel)
            assert max(int(line.split()[-2]) for line in of_kernel) <= most


def test_steps_of_all_widths_are_compiled() -> None:
    """Those of one row and of several, which Triton compiles apart."""
    assert {width for rows in (1, 3, 8) for width in graphs.widths_for(rows)} == {*WIDTHS}
    for rows, width in product((1, 3), WIDTHS):
        assert {f"{rows} x {width}, greedy", f"{rows} x {width}, sampled"} <= {*CASES}


def test_a_first_call_compiles_few_variants() -> None:
    """All widths share most of them; each takes about a second."""
    done = run(
        "-c",
        "from tests.helpers import ahead_of_time as aot\n"
        "for rows in (1, 3, 8):\n"
        "    print(*(aot.count_variants(rows, s, aot.GPUS['sm_90']) for s in (False, True)))\n",
    )
    assert done.stdout.split() == ["9", "10"] * 3, done.stderr


def test_failures_are_counted() -> None:
    """A kernel that would not launch for want of shared memory is a failure."""
    done = run(
        "-c",
        "from tests.helpers import ahead_of_time as aot\n"
        "aot.GPUS['small'] = aot.GPUS['sm_90']._replace(shared_bytes=1)\n"
        "name = next(k for k in aot.CASES if k.startswith('15 nodes'))\n"
        "for other in set(aot.CASES) - {name}:\n"
        "    del aot.CASES[other]\n"
        "raise SystemExit(aot.main(['small']))\n",
    )
    assert done.returncode == 1, done.stderr
    assert "FAILED RuntimeError: needs " in done.stdout
    assert "bytes of shared memory, the target has 1" in done.stdout
    assert not done.stdout.endswith("\n0 failures\n")


def test_compaction_loads_before_it_stores() -> None:
    """Programs of the interpreter run one thread, so only the compiled code can show the order."""
    done = run(
        "-c",
        "from tests.helpers import ahead_of_time as aot\n"
        "made = aot.compile_case('64 tokens, whole words', aot.GPUS['sm_90'])\n"
        "print(made['compact_path'].asm['ptx'])\n",
    )
    loads, _, stores = done.stdout.partition("bar.sync")
    assert loads.count("ld.global.v4") == stores.count("st.global.v4") > 0
    assert "st.global" not in loads
    assert "ld.global.v4" not in stores
