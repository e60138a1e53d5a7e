"""Layers with a window hold their window, on a device too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from lookahead_hf.cache.slots import SlotGroup
from lookahead_hf.call.execution import TOO_FAR_APART
from lookahead_hf.draft import DraftTree
from lookahead_hf.engines.cuda import graphs as graph_set
from lookahead_hf.engines.cuda.runner import CudaRunner
from lookahead_hf.rows import Rows
from lookahead_hf.runner import attention
from lookahead_hf.runner.prefill import start
from tests.helpers.caches import CACHE
from tests.helpers.calls import GREEDY, padded
from tests.helpers.device import TapeRecorder, taped
from tests.helpers.models import prompt, tiny
from tests.helpers.replayed import compare, compare_calls, sets_of
from tests.helpers.trees import by_words

WINDOW = 16


def windowed(layers: int = 2, window: int = WINDOW) -> Any:
    kinds = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    return tiny("gemma3", num_hidden_layers=layers, layer_types=kinds, sliding_window=window)


@pytest.fixture
def drops(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Little room behind the window; notes whenever a group of layers drops tokens."""
    monkeypatch.setattr(graph_set, "MAX_WIDTH", 8)
    found: list[bool] = []
    drop = SlotGroup.drop_unseen

    def dropped(group: SlotGroup, slots: int) -> None:
        before = group.dropped
        drop(group, slots)
        found.append(group.dropped is not before)

    monkeypatch.setattr(SlotGroup, "drop_unseen", dropped)
    return found


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize(("do_sample", "graphs"), [(False, True), (True, True), (False, False)])
def test_what_no_token_sees_any_more_is_dropped(
    do_sample: bool,
    graphs: bool,
    by_kernel: bool,
    drops: list[bool],
    made: list[TapeRecorder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if by_kernel:
        monkeypatch.setattr("lookahead_hf.block.layout.kernel_serves", lambda *_: True)
        monkeypatch.setattr("lookahead_hf.engines.cuda.step.kernel_serves", lambda *_: True)
        monkeypatch.setattr(attention, "kernel_serves", lambda *_: True)
        monkeypatch.setattr(attention, "kernel_is_faster", lambda *_: True)
        monkeypatch.setattr(attention, "attend_by_kernel", by_words)
    model = windowed()
    for kind in ("left", "holes"):
        given = {"max_new_tokens": 90, "do_sample": do_sample}
        stats = compare(model, padded(kind), {"cuda_graphs": graphs}, **given)
        assert stats.execution == ("replayed" if graphs else "not asked for")
        assert sum(drops) > 2
        drops.clear()
    assert len(sets_of(made)) == graphs  # the second call moved in


def test_rows_of_a_returned_cache_that_are_far_apart(
    drops: list[bool], made: list[TapeRecorder]
) -> None:
    """A row keeps what the slowest one sees, for which a set's room may be too small."""
    given = {"max_new_tokens": 90, "return_dict_in_generate": True}
    stats = compare_calls(windowed(), lambda: {**GREEDY, **padded("left"), **given})
    assert stats.engine == "device"
    assert stats.execution in ("replayed", TOO_FAR_APART)
    assert any(drops)


@pytest.mark.parametrize("asked", [False, True])
def test_they_take_no_more_memory_than_plains(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = windowed(layers=6, window=512), prompt(1, 2048)
    with torch.no_grad(), taped(monkeypatch):
        plain = DynamicCache(config=model.config)
        model(ids, **{CACHE: plain})
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)
        runner, rows = CudaRunner(model, 1, room=64, cuda_graphs=asked), Rows(ids.numpy())
        start(runner, ids)
        rows.emit(0, 5)
        runner.launch(rows, DraftTree.empty(1))
        ours = sum(store.nbytes for g in runner.cache.slots.each_group() for store in g.stores)
    assert ours <= 1.3 * held
