"""Products by tiles against the definition of AMX's instruction, and the code that is made for AMX.

The kernels' own code runs over loops in place of the instructions, and over these where the
processor has them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.engines.cpu import team
from lookahead_hf.engines.cpu.kernels import fields, program
from lookahead_hf.engines.cpu.kernels.program import tile_floats
from tests.helpers.bounds import bounds_checked
from tests.helpers.listening import Bits, Listener, same
from tests.helpers.models import prompt, tiny
from tests.helpers.programs import attended, attention, linear, multiplying, run, tree_of, workspace
from tests.helpers.scripted import RandomTrees, Scripted
from tests.helpers.tiles import use_loops

WIDTHS = (1, 2, 4, 9, 15, 16, 17, 31, 33, 48, 49, 64)
HAS_AMX = bool(program.tiles_of(torch.bfloat16))


@pytest.fixture(params=["loops", "amx"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "loops":
        use_loops(monkeypatch)
    elif not HAS_AMX:
        pytest.skip("the processor has no tiles, or the system refuses them")


def by_definition(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The sums of `tdpbf16ps`: per tile two chains of 16 from zero, whose sum joins the total."""
    size = -(-w.shape[1] // 32) * 32
    rows, tokens = (np.zeros((len(each), size), np.float32) for each in (w, x))
    for to, each in ((rows, w), (tokens, x)):
        to[:, : each.shape[1]] = each.float().numpy()
    total = np.zeros((len(x), len(w)), np.float32)
    for step in range(0, size, 32):
        chains = [np.zeros_like(total), np.zeros_like(total)]
        for k in range(step, step + 32):
            chains[k % 2] = chains[k % 2] + tokens[:, k, None] * rows[None, :, k]
        total = total + (chains[0] + chains[1])
    return torch.from_numpy(total)


def cancelling(rows: int, size: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and tokens whose products add up to zero: only rounding errors are left of sums.

    Every bit of these depends on the order of the sum, also after they are rounded to bfloat16.
    """
    half, places = (size + 1) // 2, torch.randperm(size)
    w, x = torch.randn(rows, half), torch.randn(tokens, half)
    w, x = torch.cat([w, -w], 1)[:, :size][:, places], torch.cat([x, x], 1)[:, :size][:, places]
    return w.bfloat16(), x.bfloat16()


@pytest.mark.parametrize("size", [1, 31, 32, 48, 97, 576, 2050])
@pytest.mark.parametrize("rows", [1, 33, 70])
def test_sums_are_those_of_the_instruction(tiles: None, rows: int, size: int) -> None:
    w, x = cancelling(rows, size, 64)
    whole = linear(x, w)
    assert torch.equal(whole, by_definition(w, x).bfloat16())
    for width in WIDTHS:
        at = width % 7
        part = linear(x[at : at + width].clone(), w)
        assert torch.equal(part, whole[at : at + width]), width


def test_denormal_numbers_count_as_zero_and_nan_stays_in_its_token(tiles: None) -> None:
    large, tiny_weights = torch.full((1, 32), 2.0**100), torch.full((16, 32), 2.0**-130)
    assert (linear(large.bfloat16(), tiny_weights.bfloat16()) == 0).all()
    x, w = torch.randn(20, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    whole = linear(x, w)
    x[3, 5], x[4, 6] = torch.nan, torch.inf
    out = linear(x, w)
    assert bool(out[3].isnan().all()) and not bool(out[4].isfinite().any())
    others = [0, 1, 2, *range(5, 20)]
    assert torch.equal(out[others], whole[others])


@pytest.mark.parametrize("inner", [1, 31, 48, 70])
def test_a_layer_reads_what_another_one_packed(tiles: None, inner: int) -> None:
    (w, x), down = cancelling(inner, 64, 64), torch.randn(40, inner).bfloat16()
    gate = {"KIND": fields.GATED, "FLAVOUR": fields.SILU, "WEIGHT_2": w.data_ptr()}
    adds = {"MODE": fields.ADD, "FACTOR": fields.bits(0.22)}
    for width in WIDTHS:
        between, out = torch.full((96, 96), torch.nan).bfloat16(), torch.ones(width, 40).bfloat16()
        packs = multiplying(x, w, between, down, **gate, MODE=fields.PACK)
        run([packs, multiplying(between, down, out, PACKED=1, **adds)], x.dtype, width)
        assert torch.equal(out, linear(linear(x[:width], w, down, **gate), down, **adds)), width


@pytest.mark.skipif(not HAS_AMX, reason="the processor has no tiles, or the system refuses them")
def test_loops_do_what_the_processor_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> list[torch.Tensor]:
        torch.manual_seed(0)
        products = [linear(x, w) for w, x in (cancelling(70, 333, width) for width in WIDTHS)]
        q, k, v = (torch.randn(2, n, h, 72).bfloat16() for n, h in ((40, 6), (300, 2), (300, 2)))
        return [*products, attended(q, k, v, tree_of(2, 40, 300, 0)[1])]

    by_amx = results()
    use_loops(monkeypatch)
    assert all(map(torch.equal, by_amx, results()))


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_written_behind_the_room_of_a_thread(seed: int, tiles: None) -> None:
    random = np.random.default_rng(seed)
    width, slots = int(random.integers(1, 161)), int(random.integers(161, 300))
    dim, shared, group = (int(random.integers(1, most)) for most in (130, 4, 8))
    q = torch.randn(1, width, shared * group, dim).bfloat16()
    k, v = (torch.randn(1, slots, shared, dim).bfloat16() for _ in range(2))
    _, part = tree_of(1, width, slots, seed, window=seed % 3 * 40)
    op, plan, out = attention(q, k, v, part)
    space, floats = workspace([op], q.dtype), tile_floats(plan.span, dim)
    used = floats + space._tile_room(width) // 4
    space._scratch = np.full(used + 4096, -7.0, np.float32)
    first = -space._scratch.ctypes.data % 64 // 4  # the room begins at a line of the cache
    space.run(0, 1, width, floats)
    assert (space._scratch[first + (used + 63) // 64 * 64 :] == -7.0).all()
    assert torch.equal(out, attended(q, k, v, part))


class Listening(Scripted):
    """Drafts random trees around a text, and keeps the logits behind each part of it."""

    observe = Listener.observe

    def __init__(self, text: list[int], seed: int) -> None:
        super().__init__([text], RandomTrees(seed=seed))
        self.logits: Bits = {}


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_text_and_its_bits_are_the_same_at_every_width(tiles: None, name: str) -> None:
    """Kernels compute the prompt, steps of one token and of trees, and the output layer."""
    model = lookahead_hf.enable(tiny(name, max_position_embeddings=512).bfloat16())
    ids, listener = prompt(1, 70), Listener()

    def text(drafter: Any, budget: int) -> list[int]:
        config = SpeculativeConfig((drafter,), budget=budget, compiled_layers="everywhere")
        call = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
        output = model.generate(ids, **call, speculative=config)
        stats = lookahead_hf.last_stats(model)
        assert stats is not None and stats.fallback_reason is None
        assert stats.execution == "compiled" and stats.own_code == ()
        assert (stats.num_accepted > 0) == (budget > 0)
        return output[0, 70:].tolist()

    with bounds_checked() as units:
        alone = text(listener, 0)
        for seed, threads in ((0, 1), (1, 2)):
            drafter = Listening(alone, seed)
            torch.set_num_threads(threads)
            try:
                assert text(drafter, 64) == alone
            finally:
                torch.set_num_threads(1)
            assert len(drafter.logits) > 5 and same(drafter.logits, listener.logits)
    assert len(units) > 20


ASSEMBLED = """
from lookahead_hf.ngram_pool import jit
jit.compile_here()
import numpy as np
from numba import cfunc, types
from lookahead_hf.engines.cpu.kernels._tiles_numba import attend_by_tiles
from lookahead_hf.engines.cpu.kernels.llvm import longs
from lookahead_hf.engines.cpu.kernels.tiles import release_tiles

@cfunc(types.void(types.intp))
def job(address):
    attend_by_tiles(longs(address), 0, address, address, 1, np.uint8(0))
    release_tiles(address, np.uint8(0))

print(job._library.get_asm_str())
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AMX is x86's")
def test_the_code_for_amx_has_its_instructions(tmp_path: Path) -> None:
    features = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16"
    settings = {
        "NUMBA_CPU_NAME": "sapphirerapids",
        "NUMBA_CPU_FEATURES": ",".join(f"+{each}" for each in features.split(",")),
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-c", ASSEMBLED]
    printed = subprocess.run(
        command, env=os.environ | settings, check=True, capture_output=True, text=True
    ).stdout
    for name, least in (("tdpbf16ps", 20), ("tileloadd", 20), ("tilestored", 10), ("tilezero", 9)):
        assert printed.count(f"\t{name}\t") >= least, name
    for name in ("ldtilecfg", "tilerelease", "vcvtneps2bf16", "prefetcht1"):
        assert f"\t{name}" in printed, name


@pytest.mark.parametrize("grants", [True, False])
def test_linux_is_asked_for_tiles(grants: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def syscall(number: int, request: int, about: Any) -> None:
        asked.append((number, request))
        if request == 0x1022:
            about._obj.value = (1 << 18 if grants else 0) | 7

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(syscall=syscall))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert team.may_use_tiles.__wrapped__() == grants
    assert asked == [(158, 0x1023), (158, 0x1022)]
