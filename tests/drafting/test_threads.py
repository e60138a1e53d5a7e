"""Work on rows is the same in parts and in whole, whatever the threads do."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting import threads
from lookahead_hf.drafting.calibration import Calibration
from lookahead_hf.drafting.ensemble import Ensemble
from lookahead_hf.drafting.registry import build
from lookahead_hf.drafting.threads import in_parts
from lookahead_hf.drafting.tree import head
from tests.helpers.drafts import emit, rows_of


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_parts_cover_everything_in_order(num_threads: int) -> None:
    parts = in_parts(lambda part: range(10)[part], 10, 3)
    assert [number for part in parts for number in part] == list(range(10))
    assert len(parts) == num_threads
    assert len(in_parts(lambda part: part, 5, 3)) == 1


def test_an_exception_of_any_part_is_raised_when_all_have_ended(num_threads: int) -> None:
    for bad in range(3):
        done: list[int] = []

        def work(part: slice, bad: int = bad, done: list[int] = done) -> None:
            if part.start <= bad < part.stop:
                raise KeyError(bad)
            done.append(part.start)

        with pytest.raises(KeyError):
            in_parts(work, 3, 1)
        assert len(done) == num_threads - 1


def test_without_threads_the_caller_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ending:
        def submit(self, *_: object) -> None:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(threads, "_pool", Ending())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert in_parts(lambda part: (part.start, part.stop), 4, 1) == [(0, 2), (2, 4)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    in_parts(lambda part: part, 4, 1)
    child = os.fork()
    if not child:
        os._exit(len(in_parts(lambda part: part, 4, 1)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def drafted(texts: list[list[int]], names: tuple[str, ...] | None, steps: int) -> list[DraftTree]:
    """What is drafted for some texts in their first steps, each of which emits a token a row."""
    sources, rows = build(names, {}), rows_of(texts)
    ensemble = Ensemble(sources, Calibration(sources))
    ensemble.begin(rows)
    trees = []
    for step in range(steps):
        trees.append(ensemble.propose(rows, 16))
        draft = head(trees[-1], np.arange(len(texts)) % 3)
        emitted = [[(row + step) % 6] for row in range(len(texts))]
        emit(rows, emitted)
        logits = torch.randn(len(texts), 3, 60, generator=torch.Generator().manual_seed(step))
        verdict = Verdict.from_rows(emitted, [[]] * len(texts))
        ensemble.observe(rows, draft, verdict, logits)
    assert ensemble.working
    return trees


def test_rows_draft_the_same_in_parts_together_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 6, 10 + 7 * row).tolist() for row in range(26)]
    runs = []
    for count in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        runs.append(drafted(texts, None, steps=4))
    for one, other in zip(*runs, strict=True):
        assert one.num_nodes > len(texts)
        for name in ("row_offsets", "token_ids", "parents", "depth", "score"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    (together,) = drafted(texts, ("ngram",), steps=1)
    for row, text in enumerate(texts):
        (alone,) = drafted([text], ("ngram",), steps=1)
        nodes = together.row(row)
        assert alone.token_ids.tolist() == together.token_ids[nodes].tolist()
        assert alone.parents.tolist() == together.parents[nodes].tolist()
