"""The drafter that draws on other requests: what it proposes, what it learns, what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting.calibration import Calibration
from lookahead_hf.drafting.ensemble import Ensemble
from lookahead_hf.drafting.registry import Resources, build
from lookahead_hf.drafting.sources.ngram import NgramDrafter
from lookahead_hf.drafting.sources.pool import PoolDrafter, fingerprint, open_pool
from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.rows import Rows
from tests.helpers.tiny_chat import byte_tokenizer


def pool_of(*texts: Any, **options: Any) -> NgramPool:
    pool = NgramPool(**options)
    for text in texts:
        pool.add(text)
    return pool


def rows_of(prompts: list[list[int]], emitted: list[list[int]]) -> Rows:
    """Rows (0 is padding) that have emitted some tokens."""
    ids = np.array(prompts)
    rows = Rows(ids, ids != 0)
    for row, tokens in enumerate(emitted):
        for token in tokens:
            rows.emit(row, token)
    return rows


def chains(draft: DraftTree, row: int) -> list[list[int]]:
    """Path of every node of a row."""
    found: list[list[int]] = []
    nodes = draft.row(row)
    for token, parent in zip(draft.token_ids[nodes], draft.parents[nodes], strict=True):
        found.append([*(found[parent] if parent >= 0 else []), int(token)])
    return found


def test_each_row_drafts_what_followed_its_tokens_elsewhere() -> None:
    drafter = PoolDrafter(pool_of([5, 6, 7, 8], [9, 4, 3, 2]))
    rows = rows_of([[0, 1, 5], [1, 1, 9]], [[6], [4]])
    drafter.begin(rows)
    draft = drafter.propose(rows, 8)
    assert chains(draft, 0) == [[7], [7, 8]]
    assert chains(draft, 1) == [[3], [3, 2]]
    assert draft.depth.tolist() == [1, 2, 1, 2]
    assert draft.evidence is not None
    np.testing.assert_allclose(
        draft.score[[0, 2]], drafter.rates[draft.evidence.bucket[[0, 2]]], rtol=1e-6
    )


def test_a_finished_row_gets_no_draft() -> None:
    drafter = PoolDrafter(pool_of([1, 2, 3]))
    rows = rows_of([[5, 1], [5, 1]], [[2], [2]])
    rows.finished[0] = True
    draft = drafter.propose(rows, 8)
    assert draft.row_offsets.tolist() == [0, 0, 1]
    rows.finished[1] = True
    assert drafter.propose(rows, 8).num_nodes == 0


def test_limits_are_kept() -> None:
    rows = rows_of([[5, 1]], [[2]])
    pool = pool_of([1, 2, 3, 4], [2, 9])
    assert chains(PoolDrafter(pool, min_ngram=2).propose(rows, 8), 0) == [[3], [3, 4]]
    assert PoolDrafter(pool, min_ngram=3).propose(rows, 8).num_nodes == 0
    assert PoolDrafter(pool).propose(rows, 1).num_nodes == 1


def test_without_learning_nothing_of_a_request_reaches_another() -> None:
    pool = pool_of([1, 2, 3])
    drafter = PoolDrafter(pool)
    first = rows_of([[5, 6]], [[7, 8, 9]])
    drafter.begin(first)
    drafter.propose(first, 8)
    drafter.end(first)
    assert len(pool) == 3
    assert PoolDrafter(pool).propose(rows_of([[5, 6]], [[7]]), 8).num_nodes == 0


def test_what_was_generated_is_learned_with_the_end_of_its_prompt() -> None:
    pool = NgramPool()
    drafter = PoolDrafter(pool, learn=True)
    prompts = [list(range(100, 120)), [0] * 17 + [50, 51, 52]]
    rows = rows_of(prompts, [[7, 8, 9], [60]])
    drafter.begin(rows)
    assert drafter.propose(rows, 8).num_nodes == 0
    assert len(pool) == 0
    drafter.end(rows)
    assert pool._texts().tolist() == [*range(112, 120), 7, 8, 9, -1, 50, 51, 52, 60, -1]
    later = PoolDrafter(pool)
    assert chains(later.propose(rows_of([[118, 119]], [[7]]), 8), 0) == [[8], [8, 9]]


def test_pads_after_a_text_are_not_learned() -> None:
    pool = NgramPool()
    rows = rows_of([[1, 2, 3], [0, 4, 5]], [[7, 8], [9]])
    rows.end(1)
    for row, token in ((0, 6), (1, 0), (1, 0)):
        rows.emit(row, token)
    PoolDrafter(pool, learn=True).end(rows)
    assert pool._texts().tolist() == [1, 2, 3, 7, 8, 6, -1, 4, 5, 9, -1]


def test_a_row_that_emitted_nothing_teaches_nothing() -> None:
    pool = NgramPool()
    PoolDrafter(pool, learn=True).end(rows_of([[1, 2, 3]], [[]]))
    assert pool.info.num_texts == 0


def test_the_requests_own_text_is_believed_more_until_the_pool_has_earned_it() -> None:
    prior = PoolDrafter(NgramPool()).prior()
    assert (prior < NgramDrafter().prior()).all()
    pool, own = PoolDrafter(pool_of([1, 2, 3])), NgramDrafter()
    calibration = Calibration([own, pool])
    ensemble = Ensemble([own, pool], calibration)
    rows = rows_of([[1, 2, 4, 9, 1]], [[2]])
    ensemble.begin(rows)
    assert ensemble.propose(rows, 1).token_ids.tolist() == [4]
    calibration.rates[own.num_buckets :] = 0.95
    assert ensemble.propose(rows, 1).token_ids.tolist() == [3]


def test_a_pool_that_fails_in_a_call_costs_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, own = PoolDrafter(pool_of([1, 2, 3])), NgramDrafter()
    ensemble = Ensemble([pool, own], Calibration([pool, own]))
    rows = rows_of([[1, 2, 4, 9, 1]], [[2]])
    ensemble.begin(rows)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(NgramPool, "grow", fail)
    with pytest.warns(RuntimeWarning, match="'pool'.*the disk is gone"):
        draft = ensemble.propose(rows, 1)
    assert draft.token_ids.tolist() == [4]


WRONG = [
    ({"pool": "file"}, "NgramPool"),
    ({"learn": 1}, "learn must be True or False"),
    ({"min_ngram": 0}, "min_ngram=0"),
    ({"vocab_size": 99}, "token ids below 100, the model below 99"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[next(iter(o)) for o, _ in WRONG])
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolDrafter(**{"pool": NgramPool(vocab_size=100), **options})


def test_a_larger_vocabulary_of_the_model_is_padding() -> None:
    PoolDrafter(NgramPool(vocab_size=1_000), vocab_size=1_024)
    PoolDrafter(NgramPool(), vocab_size=1_024)


def test_a_pool_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    pool_of([1, 2, 3], tokenizer_fingerprint=fingerprint(tokenizer)).save(tmp_path / "pool")

    def built() -> None:
        resources = Resources(pool=tmp_path / "pool", tokenizers=(tokenizer, None))
        build(("pool",), {}, resources)

    built()
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(ValueError, match="build a pool with the tokenizer of this model"):
        built()


@pytest.mark.filterwarnings("error")
def test_a_much_smaller_vocabulary_is_spoken_of_once() -> None:
    pool = NgramPool(vocab_size=50_257, tokenizer_fingerprint="abc")
    PoolDrafter(pool, vocab_size=50_304)
    with pytest.warns(RuntimeWarning, match="below 50257, the model below 128256.*tokenizer="):
        PoolDrafter(pool, vocab_size=128_256)
    PoolDrafter(pool, vocab_size=128_256)
    PoolDrafter(NgramPool(), vocab_size=128_256)


@pytest.mark.filterwarnings("error")
def test_a_processors_tokenizer_is_looked_at() -> None:
    @dataclass
    class Processor:
        tokenizer: Any

    tokenizer = byte_tokenizer()
    size, known = len(tokenizer), fingerprint(tokenizer)
    pool = NgramPool(vocab_size=size, tokenizer_fingerprint=known)
    PoolDrafter(pool, vocab_size=2 * size, tokenizer=Processor(tokenizer))
    other = NgramPool(vocab_size=size, tokenizer_fingerprint="of another")
    with pytest.raises(ValueError, match="build a pool with the tokenizer of this model"):
        PoolDrafter(other, vocab_size=2 * size, tokenizer=Processor(tokenizer))


def test_a_file_is_opened_once_until_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    pool_of([1, 2, 3]).save(path)
    first = open_pool(path)
    assert open_pool(str(path)) is first
    assert open_pool(first) is first
    pool_of([1, 2, 3, 4]).save(path)
    assert len(open_pool(path)) == 4
    assert len(first) == 3


def test_a_fingerprint_tells_vocabularies_apart() -> None:
    tokenizer = byte_tokenizer()
    known = fingerprint(tokenizer)
    assert known == fingerprint(byte_tokenizer())
    assert len(known) == 32
    tokenizer.add_tokens(["<new>"])
    assert fingerprint(tokenizer) != known
