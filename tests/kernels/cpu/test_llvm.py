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


MULTIPLIED = """
import numpy as np
from lookahead_hf.kernels.cpu._products_numba import product
rng, size, rows = np.random.default_rng(0), 1024, 9
w = rng.random((rows, size), np.float32)
for tokens in range(1, 20):
    x = rng.random((tokens, size), np.float32)
    out = np.full((tokens + 4, rows), -7, np.float32)
    product(w.ctypes.data, 0, rows, size, x.ctypes.data, tokens, out.ctypes.data, rows, w[0, 0])
    np.testing.assert_allclose(out[:tokens], x @ w.T, rtol=1e-4)
    assert (out[tokens:] == -7).all(), tokens
"""


@pytest.mark.parametrize("cpu", ["generic", None])
def test_products_write_the_tokens_of_a_block_and_no_others(cpu: str | None) -> None:
    environment = os.environ | ({"NUMBA_CPU_NAME": cpu} if cpu else {})
    subprocess.run([sys.executable, "-c", MULTIPLIED], env=environment, check=True)
