"""K and V of a call are freed when it ends, whether or not Python looks for circles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf.cache.slots import SlotCache
from lookahead_hf.kernels.data import PathTable
from tests.helpers.calls import padded
from tests.helpers.compared import speculated
from tests.helpers.device import on_device
from tests.helpers.models import tiny
from tests.helpers.scripted import RandomTrees, continuations, scripted
from tests.helpers.slots import cache_of

GREEDY = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 64}


@contextmanager
def uncollected() -> Iterator[None]:
    """Only reference counts free anything."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def live_bytes() -> int:
    """Bytes of all tensors that can be reached from Python, or that nobody has looked for."""
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    storages = [each.untyped_storage() for each in tensors if each.layout == torch.strided]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class Watcher:
    """A streamer that notes how much there is while a text is written."""

    def __init__(self) -> None:
        self.most = 0
        self.count = 0

    def put(self, value: torch.Tensor) -> None:
        self.count += 1
        if self.count % 40 == 0:
            self.most = max(self.most, live_bytes())

    def end(self) -> None:
        """Nothing to end."""


def caches() -> list[Any]:
    return [each for each in gc.get_objects() if type(each) in (SlotCache, PathTable)]


def drafting(model: Any, inputs: dict[str, Any], **fields: Any) -> Any:
    truths = continuations(model.generate(**inputs, **GREEDY), inputs["input_ids"].shape[1])
    config = scripted(truths, RandomTrees())
    return replace(config, **fields)


@pytest.mark.parametrize(
    ("name", "fields", "where"),
    [
        ("llama", {}, nullcontext),
        ("gemma3", {"draft_invariant": True}, nullcontext),
        ("llama", {"cuda_graphs": False}, on_device),
    ],
)
def test_a_call_leaves_nothing_behind(
    name: str, fields: dict[str, Any], where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lookahead_hf.enable(tiny(name))
    inputs = padded("left", 2, 16)
    config = drafting(model, inputs, **fields)
    with where(monkeypatch):
        model.generate(**inputs, **GREEDY, speculative=config)  # what stays with the model
        assert speculated(model).engine == ("device" if where is on_device else "walk")
        peaks, left = [], []
        with uncollected():
            for _ in range(3):
                watcher = Watcher()
                model.generate(**inputs, **GREEDY, speculative=config, streamer=watcher)
                peaks.append(watcher.most)
                left.append(live_bytes())
                assert caches() == []
    assert max(peaks) < 1.2 * peaks[0]  # the drafts differ
    if where is not on_device:
        assert min(peaks) > left[0] and left == left[:1] * 3


def test_a_cache_that_grows_holds_one_layer_twice() -> None:
    """Also where compaction knew the layers as they were."""
    cache = cache_of(None, [5, 5])
    for _ in range(3):
        cache.add("only", *(torch.zeros(2, 256, 64, 64) for _ in "kv"))
    (group,) = cache.each_group()
    assert len(group.path_table.words)
    with uncollected():
        grown = []
        real = torch.Tensor.new_zeros

        def watched(*args: Any) -> torch.Tensor:
            grown.append(live_bytes())
            return real(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "new_zeros", watched)
            group.grow(512)
        after = live_bytes()
    assert max(grown) < after
