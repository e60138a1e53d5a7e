"""Which graphs a model keeps, for how long, and how calls run without them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.call.execution import FAILED, IN_USE, TOO_LARGE, WAITS
from lookahead_hf.engines.cuda import graphs
from lookahead_hf.model.state import state_of
from tests.helpers.calls import GREEDY, padded
from tests.helpers.compared import speculated
from tests.helpers.compiled import in_threads
from tests.helpers.device import TapeRecorder
from tests.helpers.models import prompt
from tests.helpers.replayed import WIDTHS, Switch, compare, sets_of, small, streamed


def test_later_calls_move_into_the_same_graphs(made: list[TapeRecorder]) -> None:
    model = small()
    compare(model, padded("left"))
    compare(model, padded("holes", length=30))
    assert len(sets_of(made)) == 1
    (recorder,) = sets_of(made)
    assert 1 < len(recorder.recordings) <= len(WIDTHS)
    assert recorder.calls == ["begin", "end"] * 2  # each waits for the one before
    lookahead_hf.disable(lookahead_hf.enable(model))
    assert recorder.released == len(recorder.recordings)


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
    assert str(compare(model, padded("left")).execution).startswith(WAITS)
    assert sets_of(made) == []


def test_a_failed_capture_costs_a_kind_of_calls_its_graphs_until_all_are_freed(
    made: list[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, record = small(), TapeRecorder.record

    def fails(*_: Any) -> Any:
        monkeypatch.setattr(TapeRecorder, "record", record)
        raise torch.OutOfMemoryError("no memory\nfor graphs")

    monkeypatch.setattr(TapeRecorder, "record", fails)
    states = [compare(model, padded("left")).execution for _ in range(2)]
    assert states == [f"{FAILED}: OutOfMemoryError: no memory"] * 2
    assert compare(model, padded("none", rows=1)).execution == "replayed", "another kind"
    state_of(model).free()
    assert compare(model, padded("left")).execution == "replayed"


def test_no_memory_for_k_and_v_leaves_the_text_alone(
    made: list[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    monkeypatch.setattr(graphs, "_zeros", lambda *_: torch.empty(1 << 60))
    assert str(compare(model, padded("left")).execution).startswith(f"{FAILED}: RuntimeError")


def test_two_kinds_of_calls_take_turns_and_a_third_replaces_one(made: list[TapeRecorder]) -> None:
    model = small()
    for _ in range(2):
        assert compare(model, padded("left")).execution == "replayed"
        assert compare(model, padded("left"), do_sample=True).execution == "replayed"
    assert [recorder.released for recorder in sets_of(made)] == [0, 0]
    assert compare(model, padded("none", rows=1)).execution == "replayed"
    first, *others = sets_of(made)
    assert first.released == len(first.recordings)
    assert [recorder.released for recorder in others] == [0, 0]


def test_what_is_too_large_retires_nothing_and_what_fits_takes_the_place(
    made: list[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "LEAST_VISIBLE", 64)
    model = small()
    compare(model, padded("left"))
    (kept,) = graphs.graphs_of(model).sets
    monkeypatch.setattr(graphs, "_limit", lambda *_: kept.nbytes)
    stats = compare(model, padded("left"), max_new_tokens=120)
    assert str(stats.execution).startswith(TOO_LARGE)
    assert compare(model, padded("left")).execution == "replayed"
    assert compare(model, padded("none", rows=1)).execution == "replayed"
    assert [recorder.released > 0 for recorder in sets_of(made)] == [True, False]


def test_one_call_at_a_time(made: list[TapeRecorder]) -> None:
    model = small()
    compare(model, padded("left"))
    (held,) = graphs.graphs_of(model).sets
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
    assert made[-1].released == len(made[-1].recordings)
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
    models = [lookahead_hf.enable(small()) for _ in range(3)]
    config = SpeculativeConfig(budget=4, cuda_graphs=True)

    def run(index: int) -> None:
        for rows in (1, 2, 3):
            models[index].generate(prompt(rows), **GREEDY, speculative=config)

    in_threads(*(partial(run, index) for index in range(3)))
    assert [speculated(model).execution for model in models] == ["replayed"] * 3


@pytest.mark.parametrize(
    ("tokens", "gigabytes", "fits"),
    [(131072, 80, True), (65536, 80, True), (16384, 24, True), (131072, 24, False)],
)
def test_a_model_of_8b_keeps_its_graphs(
    tokens: int, gigabytes: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside its weights in half precision, a gigabyte of torch's own, and what the prompt made."""
    of_token = 32 * 8 * 128 * 2 * 2  # layers, heads, numbers, K and V, bytes
    taken = 16.06e9 + 0.7e9 + 17 / 16 * tokens * of_token
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (gigabytes * 1e9 - taken, 0))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    size = of_token * graphs.capacity_for(tokens + 64)
    assert (size <= graphs._limit(torch.device("cuda"), [])) == fits
    assert size <= 1.07 * of_token * (tokens + 64)
