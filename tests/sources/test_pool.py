"""The drafter that draws on other requests: what it proposes, what it learns, what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lookahead_hf import SpeculativeConfig
from lookahead_hf.call.prepared import Request
from lookahead_hf.drafting.registry import build
from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.ngram_pool.pool import open_pool
from lookahead_hf.sources.pool import PoolDrafter, fingerprint
from lookahead_hf.stats import SpeculativeStats
from tests.helpers.calls import GREEDY
from tests.helpers.compared import compared
from tests.helpers.drafts import emit, paths, rows_of
from tests.helpers.models import prompt, tiny
from tests.helpers.ngrams import held, pool_of
from tests.helpers.tiny_chat import byte_tokenizer


def test_each_row_drafts_what_followed_its_tokens_elsewhere() -> None:
    drafter = PoolDrafter(pool_of([5, 6, 7, 8], [9, 4, 3, 2]))
    rows = rows_of([[1, 5, 6], [1, 1, 9, 4]])
    drafter.begin(rows)
    draft = drafter.propose(rows, 8)
    assert paths(draft, 0) == [[7], [7, 8]]
    assert paths(draft, 1) == [[3], [3, 2]]
    assert draft.depth.tolist() == [1, 2, 1, 2]
    assert draft.evidence is not None
    np.testing.assert_allclose(
        draft.score[[0, 2]], drafter.rates[draft.evidence.bucket[[0, 2]]], rtol=1e-6
    )


def test_what_was_generated_is_learned_with_the_end_of_its_prompt() -> None:
    pool = NgramPool()
    drafter = PoolDrafter(pool, learn=True)
    rows = rows_of([[*range(100, 120), 7], [50, 51, 52, 60]])
    emit(rows, [[8, 9]])
    drafter.begin(rows)
    assert drafter.propose(rows, 8).num_nodes == 0
    assert len(pool) == 0
    drafter.end(rows)
    assert held(pool) == [*range(112, 120), 7, 8, 9, -1, 50, 51, 52, 60, -1]
    later = PoolDrafter(pool)
    assert paths(later.propose(rows_of([[118, 119, 7]]), 8), 0) == [[8], [8, 9]]


WRONG = [
    ({"pool": "file"}, "NgramPool"),
    ({"learn": 1}, "learn must be True or False"),
    ({"vocab_size": 99}, "token ids below 100, the model below 99"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[next(iter(o)) for o, _ in WRONG])
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolDrafter(**{"pool": NgramPool(vocab_size=100), **options})


@pytest.mark.parametrize("is_processor", [False, True])
def test_a_pool_of_another_tokenizer_is_refused(tmp_path: Path, is_processor: bool) -> None:
    tokenizer = byte_tokenizer()
    given = SimpleNamespace(tokenizer=tokenizer) if is_processor else tokenizer
    pool_of([1, 2, 3], tokenizer_fingerprint=fingerprint(tokenizer)).save(tmp_path / "pool")

    def built() -> None:
        build(Request(SpeculativeConfig(("pool",), pool=tmp_path / "pool"), tokenizer=given))

    built()
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(ValueError, match="build a pool with the tokenizer of this model"):
        built()


def test_a_file_is_opened_once_until_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    pool_of([1, 2, 3]).save(path)
    first = open_pool(path)
    assert open_pool(str(path)) is first
    assert open_pool(first) is first
    pool_of([1, 2, 3, 4]).save(path)
    assert len(open_pool(path)) == 4
    assert len(first) == 3


def generated(pool: Any) -> SpeculativeStats:
    """How a text went that was drafted from a pool and from itself."""
    call = {"input_ids": prompt(), **GREEDY}
    fields = {"drafters": ("ngram", "pool"), "pool": pool, "budget": 24}
    return compared(tiny("llama"), lambda: dict(call), 12, **fields).stats


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of a pool that knows the text."""
    pool_of(tiny("llama").generate(prompt(), **GREEDY)[0].tolist()).save(tmp_path / "pool")
    return tmp_path / "pool"


def test_a_pool_that_fails_after_the_first_tokens_costs_a_warning(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grow, calls = NgramPool.grow, 0

    def fail_later(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError("the disk is gone")
        return grow(*arguments)

    monkeypatch.setattr(NgramPool, "grow", fail_later)
    with pytest.warns(RuntimeWarning, match="'pool'.*the disk is gone"):
        stats = generated(path)
    assert calls == 2 and stats.per_source["pool"].accepted > 0
    assert generated(path).per_source["pool"].accepted > 20
