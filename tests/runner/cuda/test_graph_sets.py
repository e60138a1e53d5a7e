"""Which graphs a model keeps, for how long, and how calls run without them."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.model_state import state_of
from lookahead_hf.runner.cuda import graph_set, graphs
from lookahead_hf.runner.execution import (
    BUSY,
    FAILED,
    IN_USE,
    OTHER_KINDS,
    TOO_LARGE,
    TOO_SHORT,
    WAITS,
)
from tests.helpers.calls import GREEDY, padded
from tests.helpers.device import TapeRecorder
from tests.helpers.models import prompt
from tests.helpers.replayed import WIDTHS, Switch, compare, sets_of, small, streamed


def test_later_calls_move_into_the_same_graphs(made: list[TapeRecorder]) -> None:
    model = small()
    compare(model, padded("left"))
    compare(model, padded("holes", length=30))
    assert len(sets_of(made)) == 1
    assert len(sets_of(made)[0].recordings) == len(WIDTHS)
    compare(model, padded("none", rows=2))
    assert [recorder.released for recorder in sets_of(made)] == [0, 0]
    compare(model, padded("none", rows=1))
    first, second, third = sets_of(made)
    assert first.released == len(WIDTHS)  # all together
    assert second.released == third.released == 0
    lookahead_hf.disable(lookahead_hf.enable(model))
    assert second.released == third.released == len(WIDTHS)


def test_a_short_call_of_another_shape_leaves_the_graphs(made: list[TapeRecorder]) -> None:
    model = small()
    compare(model, padded("left"))
    stats = compare(model, padded("none", rows=2), {"cuda_graphs": "auto"}, max_new_tokens=20)
    assert stats.execution == TOO_SHORT
    assert compare(model, padded("left")).execution == "replayed"
    (recorder,) = sets_of(made)
    assert recorder.released == 0
    assert recorder.calls == ["begin", "end"] * 2  # each waits for the one before


def test_a_forward_that_waits_is_not_captured(
    made: list[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    kind = type(model.model.norm)
    own = kind.forward

    def waiting(self: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.sum().item() == x.sum().item()
        return own(self, x)

    monkeypatch.setattr(kind, "forward", waiting)
    tried = []
    try_out = TapeRecorder.try_out
    monkeypatch.setattr(
        TapeRecorder, "try_out", lambda self, run: tried.append(1) or try_out(self, run)
    )
    for _ in range(4):  # the later calls know already
        assert str(compare(model, padded("left")).execution).startswith(WAITS)
    assert sets_of(made) == []
    assert len(tried) == 1


def failing(recorder: type[TapeRecorder], times: int, patch: pytest.MonkeyPatch) -> list[int]:
    """Let so many captures fail; return a list with one entry for each failure."""
    record, failed = recorder.record, []

    def fails(self: Any, run: Any) -> Any:
        if len(failed) < times:
            failed.append(1)
            raise torch.OutOfMemoryError("no memory\nfor graphs")
        return record(self, run)

    patch.setattr(recorder, "record", fails)
    return failed


NO_MEMORY = f"{FAILED}: OutOfMemoryError: no memory"


def test_a_failed_capture_is_tried_again(
    made: list[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, model = failing(TapeRecorder, 2, monkeypatch), small()
    states = [compare(model, padded("left")).execution for _ in range(6)]
    assert states == [NO_MEMORY] * 5 + ["replayed"], "one call goes by, then two"
    assert len(failed) == 2


@pytest.mark.parametrize(("disabled", "rows"), [(True, 3), (False, 1)])
def test_a_failure_concerns_one_kind_of_calls_until_it_is_freed(
    disabled: bool, rows: int, made: list[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(TapeRecorder, 1, monkeypatch)
    model = small()
    assert compare(model, padded("none")).execution == NO_MEMORY
    if disabled:
        lookahead_hf.disable(lookahead_hf.enable(model))
    assert compare(model, padded("none", rows=rows)).execution == "replayed"


def test_no_memory_for_k_and_v_leaves_the_text_alone(
    made: list[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    with monkeypatch.context() as patch:
        patch.setattr(graph_set, "_room", lambda *_: torch.empty(1 << 60))
        stats = compare(model, padded("left"))
    assert str(stats.execution).startswith(f"{FAILED}: RuntimeError")
    assert compare(model, padded("left")).execution == stats.execution
    assert compare(model, padded("left")).execution == "replayed"


def test_two_kinds_of_calls_take_turns(made: list[TapeRecorder]) -> None:
    model = small()
    for _ in range(3):
        assert compare(model, padded("left")).execution == "replayed"
        assert compare(model, padded("left"), do_sample=True).execution == "replayed"
    assert [recorder.released for recorder in sets_of(made)] == [0, 0]


def test_a_third_kind_has_to_wait_until_another_is_over(
    made: list[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "WORTHWHILE", 10)
    model = small()

    def state(rows: int, asked: bool | str = "auto") -> str | None:
        inputs, fields = padded("none", rows=rows), {"cuda_graphs": asked}
        return compare(model, inputs, fields, max_new_tokens=16).execution

    for _ in range(4):
        assert [state(rows) for rows in (1, 2, 3)] == ["replayed", "replayed", OTHER_KINDS]
    assert len(sets_of(made)) == 2
    # The last of those counts, and there is none with one row any more.
    assert [state(rows) for rows in (3, 2, 3, 2)] == [OTHER_KINDS, "replayed"] * 2
    assert state(3) == "replayed"
    assert [recorder.released for recorder in sets_of(made)] == [len(WIDTHS), 0, 0]
    assert state(1) == OTHER_KINDS
    assert state(1, True) == "replayed", "as it is insisted on"


def test_what_is_too_large_retires_nothing(
    made: list[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_set, "LEAST_VISIBLE", 64)
    model = small()
    compare(model, padded("left"))
    (kept,) = graphs.of_model(model).sets
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "_limit", lambda *_: kept.nbytes)
        stats = compare(model, padded("left"), max_new_tokens=120)
    assert str(stats.execution).startswith(TOO_LARGE)
    assert compare(model, padded("left")).execution == "replayed"
    (recorder,) = sets_of(made)
    assert recorder.released == 0
    assert compare(model, padded("left"), max_new_tokens=120).execution == "replayed"
    assert [recorder.released > 0 for recorder in sets_of(made)] == [True, False]


def test_where_there_is_no_room_for_two_one_gives_way(
    made: list[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    compare(model, padded("left"))
    (kept,) = graphs.of_model(model).sets
    monkeypatch.setattr(graphs, "_limit", lambda *_: kept.nbytes)
    assert compare(model, padded("none", rows=1)).execution == "replayed"
    assert [recorder.released for recorder in sets_of(made)] == [len(WIDTHS), 0]


def test_one_call_at_a_time(made: list[TapeRecorder]) -> None:
    model = small()
    compare(model, padded("left"))
    (held,) = graphs.of_model(model).sets
    held.is_used = True
    stats = compare(model, padded("left"))
    assert stats.execution == IN_USE
    held.is_used = False
    assert compare(model, padded("left")).execution == "replayed"


def test_what_is_in_use_is_freed_when_its_call_ends(made: list[TapeRecorder]) -> None:
    model, released = small(), []

    def release() -> None:
        state_of(model).free()
        released.append(made[-1].released)

    text, stats = streamed(model, True, Switch({20: release}))
    assert stats.execution == "replayed"
    assert released == [0]
    assert made[-1].released == len(WIDTHS)
    assert streamed(model, False)[0] == text


def test_one_capture_at_a_time(made: list[TapeRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    busy: list[str] = []

    def alone(name: str) -> None:
        own = getattr(TapeRecorder, name)

        def run(self: Any, *args: Any) -> Any:
            busy.append(name)
            try:
                return own(self, *args)
            finally:
                assert busy == [name]
                busy.remove(name)

        monkeypatch.setattr(TapeRecorder, name, run)

    for name in ("try_out", "record", "release"):
        alone(name)
    models = [small() for _ in range(3)]
    found: dict[int, str | None] = {}

    def run(index: int) -> None:
        for rows in (1, 2, 3):
            ids = prompt(rows)
            config = SpeculativeConfig(budget=4, cuda_graphs=True)
            models[index].generate(ids, **GREEDY, speculative=config)
        stats = lookahead_hf.last_stats(models[index])
        found[index] = None if stats is None else stats.execution

    for model in models:
        lookahead_hf.enable(model)
    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(state in ("replayed", BUSY) for state in found.values())
    assert "replayed" in found.values()


def test_who_cannot_capture_now_does_so_later(made: list[TapeRecorder]) -> None:
    model = small()
    expected, _ = streamed(model, False)
    with graph_set._capturing:
        text, stats = streamed(model, True)
    assert (text, stats.execution) == (expected, BUSY)
    assert sets_of(made) == []
    graph_set._capturing.acquire()
    text, stats = streamed(model, True, Switch({15: graph_set._capturing.release}))
    assert (text, stats.execution) == (expected, "replayed")
    (recorder,) = sets_of(made)
    assert 0 < sum(r.num_replays for r in recorder.recordings) < stats.num_steps


def test_a_dead_model_takes_its_graphs_along(made: list[TapeRecorder]) -> None:
    model = small()
    compare(model, padded("none"))
    kept = weakref.ref(graphs.of_model(model))
    del model
    gc.collect()
    assert kept() is None


def test_retired_graphs_leave_no_k_and_v_behind(made: list[TapeRecorder]) -> None:
    model = small()
    compare(model, padded("none"))
    (kept,) = graphs.of_model(model).sets
    stores = [weakref.ref(store) for pair in kept.stores for store in pair]
    del kept
    made[-1].recordings.clear()  # a tape holds its tensors
    gc.collect()
    gc.disable()
    try:
        state_of(model).free()
        assert not any(store() is not None for store in stores)
    finally:
        gc.enable()
