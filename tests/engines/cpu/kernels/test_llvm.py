"""What the kernels take the processor for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")

PRINTED = "from lookahead_hf.engines.cpu.kernels import llvm; print(llvm.LANES, llvm.HAS_PAIRS)"


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
from lookahead_hf.engines.cpu.kernels._vectors_numba import product
from lookahead_hf.ngram_pool import jit
jit.may_compile = True
rng, size, rows = np.random.default_rng(0), 1024, 9
room = np.empty((6, size), np.float32)

def as_kind(numbers, kind):  # what is left out of bfloat16 is 0
    bits = numbers.view(np.uint32)
    bits &= np.uint32(0xFFFFFFFF if kind.dtype == np.float32 else 0xFFFF0000)
    return numbers if kind.dtype == np.float32 else (bits >> 16).astype(np.uint16)

for kind in (np.float32(0), np.uint16(0)):
    w = rng.random((rows, size), np.float32)
    held = as_kind(w, kind)
    for tokens in range(1, 20):
        x = rng.random((tokens, size), np.float32)
        tokens_held = as_kind(x, kind)
        out = np.full((tokens + 4, rows), -7, np.float32)
        given = held.ctypes.data, 0, rows, size, tokens_held.ctypes.data, tokens, out.ctypes.data
        product(*given, rows, room.ctypes.data, kind)
        np.testing.assert_allclose(out[:tokens], x @ w.T, rtol=1e-4)
        assert (out[tokens:] == -7).all(), tokens
"""


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["generic", None])
def test_products_write_the_tokens_of_a_block_and_no_others(cpu: str | None) -> None:
    environment = os.environ | ({"NUMBA_CPU_NAME": cpu} if cpu else {})
    subprocess.run([sys.executable, "-c", MULTIPLIED], env=environment, check=True)


FLOAT16 = """
from lookahead_hf.engines.cpu.kernels import program
program._load_layers("float16")
"""


def test_without_instructions_for_float16_there_are_no_kernels_for_it() -> None:
    """LLVM would call functions that no library of the process has."""
    environment = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    command = [sys.executable, "-c", FLOAT16]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    (*_, last) = found.stderr.splitlines()
    assert "the processor has no instructions that convert float16 numbers" in last
