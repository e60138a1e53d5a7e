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


@pytest.fixture(scope="module")
def printed() -> tuple[str, ...]:
    """What a process prints about a first call, a kernel that does not fit, and compaction."""
    done = run(
        "-c",
        "from tests.helpers import ahead_of_time as aot\n"
        "gpu = aot.GPUS['sm_90']\n"
        "for rows in (1, 3, 8):\n"
        "    print(*(aot.count_variants(rows, is_sampled, gpu) for is_sampled in (False, True)))\n"
        "made = aot.compile_case('64 tokens, whole words', gpu)\n"
        "print('#', made['compact_path'].asm['ptx'], '#')\n"
        "aot.GPUS['small'] = gpu._replace(shared_bytes=1)\n"
        "name = next(k for k in aot.CASES if k.startswith('15 nodes'))\n"
        "for other in set(aot.CASES) - {name}:\n"
        "    del aot.CASES[other]\n"
        "print('status', aot.main(['small']))\n",
    )
    assert done.returncode == 0, done.stderr
    return tuple(done.stdout.split("#"))


def test_a_first_call_compiles_few_variants(printed: tuple[str, ...]) -> None:
    """All widths share most of them; each takes about a second."""
    assert printed[0].split() == ["9", "10"] * 3


def test_compaction_loads_before_it_stores(printed: tuple[str, ...]) -> None:
    """Programs of the interpreter run one thread, so only the compiled code can show the order."""
    loads, _, stores = printed[1].partition("bar.sync")
    assert loads.count("ld.global.v4") == stores.count("st.global.v4") > 0
    assert "st.global" not in loads
    assert "ld.global.v4" not in stores


def test_failures_are_counted(printed: tuple[str, ...]) -> None:
    """A kernel that would not launch for want of shared memory is a failure."""
    assert "FAILED RuntimeError: needs " in printed[2]
    assert "bytes of shared memory, the target has 1" in printed[2]
    assert "\n0 failures\n" not in printed[2] and printed[2].endswith("\nstatus 1\n")
