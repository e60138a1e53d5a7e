"""Pools found wrong in the middle of a call cost a warning at most, never the text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.stats import SpeculativeStats
from tests.helpers.models import prompt, tiny

GREEDY = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}


def generated(pool: Any) -> tuple[list[list[int]], SpeculativeStats]:
    """A text drafted from a pool and from itself, and how it went."""
    model = tiny("llama")
    config = SpeculativeConfig(drafters=("ngram", "pool"), pool=pool, budget=24)
    with lookahead_hf.enabled(model):
        ids = model.generate(prompt(), **GREEDY, speculative=config).tolist()
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None
    return ids, stats


@pytest.fixture
def plain() -> list[list[int]]:
    return tiny("llama").generate(prompt(), **GREEDY).tolist()


@pytest.fixture
def path(tmp_path: Path, plain: list[list[int]]) -> Path:
    """A file of a pool that knows the text."""
    pool = NgramPool()
    pool.add(plain[0])
    pool.save(tmp_path / "pool")
    return tmp_path / "pool"


def test_a_pool_that_fails_after_the_first_tokens_costs_a_warning(
    path: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    grow, calls = NgramPool.grow, 0

    def fail_later(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError("the disk is gone")
        return grow(*arguments, **options)

    monkeypatch.setattr(NgramPool, "grow", fail_later)
    with pytest.warns(RuntimeWarning, match="'pool'.*the disk is gone"):
        ids, stats = generated(path)
    assert ids == plain
    assert calls == 2 and stats.per_source["pool"].accepted > 0


def test_a_file_that_is_written_into_costs_a_warning_and_is_opened_anew(
    path: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    grow, content, calls = NgramPool.grow, path.read_bytes(), 0

    def write_later(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            path.write_bytes(content)
            os.utime(path, ns=(0, 0))
        return grow(*arguments, **options)

    monkeypatch.setattr(NgramPool, "grow", write_later)
    with pytest.warns(RuntimeWarning, match="'pool'.*was written into while it was open"):
        ids, _ = generated(path)
    assert ids == plain
    ids, stats = generated(path)
    assert ids == plain and stats.per_source["pool"].accepted > 20


def test_damage_that_is_not_looked_for_costs_drafts_only(
    path: Path, plain: list[list[int]]
) -> None:
    _, whole = generated(path)
    assert whole.per_source["pool"].accepted > 20
    content = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    start = 8 + int.from_bytes(content[:8], "little")
    content[start:] = rng.integers(0, 256, len(content) - start, np.uint8).tobytes()
    path.write_bytes(content)
    ids, stats = generated(path)
    assert ids == plain
    assert stats.per_source["pool"].accepted < whole.per_source["pool"].accepted
