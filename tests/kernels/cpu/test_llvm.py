"""What the kernels take the processor for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")

PRINTED = "from lookahead_hf.kernels.cpu import llvm; print(llvm.LANES, llvm.HAS_PAIRS)"


@pytest.mark.parametrize(
    ("setting", "value"),
    [("CPU_NAME", "generic"), ("ENABLE_AVX", "0"), ("CPU_FEATURES", "+sse2,-avx512f")],
)
def test_what_numba_does_not_compile_for_is_not_used(setting: str, value: str) -> None:
    """LLVM ends the process at an instruction that the processor is said not to have."""
    environment = os.environ | {f"NUMBA_{setting}": value}
    command = [sys.executable, "-c", PRINTED]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert printed.stdout.split() == ["8", "False"]
