"""Where memory runs out in what plain does not do, the text is plain's all the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf.cache.adopt import AdoptedCache
from lookahead_hf.cache.slots import SlotGroup, Stores
from lookahead_hf.drafting.session import DraftSession
from lookahead_hf.engines.cuda import decision
from lookahead_hf.fallback import FallbackReason
from tests.helpers.caches import CACHE
from tests.helpers.calls import GREEDY, padded
from tests.helpers.compared import compared, reason_of
from tests.helpers.device import on_device, taped
from tests.helpers.fakes import Recorder
from tests.helpers.models import tiny
from tests.helpers.replayed import compare


@pytest.fixture(params=["host", "device"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls as on a CPU, and as on a GPU."""
    if request.param == "host":
        yield
    else:
        with on_device(monkeypatch):
            yield


def fails_at(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *numbers: int
) -> list[tuple[Any, ...]]:
    """Let a method run out of memory in these calls, counted from 1; return the calls so far."""
    method, calls = getattr(owner, name), list[tuple[Any, ...]]()

    def called(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) in numbers:
            raise torch.OutOfMemoryError("no memory")
        return method(*arguments)

    monkeypatch.setattr(owner, name, called)
    return calls


@pytest.mark.filterwarnings("ignore::lookahead_hf.SpeculationFallbackWarning")
@pytest.mark.parametrize("do_sample", [False, True])
def test_while_the_cache_is_taken_over(
    do_sample: bool, engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("gemma3")
    given = {**GREEDY, "do_sample": do_sample, **padded("left", 1)}
    texts, calls = [], fails_at(monkeypatch, AdoptedCache, "_to_slots", 3)  # in the second layer
    for asked in (False, True):
        torch.manual_seed(3)
        streamer = Recorder()
        with lookahead_hf.enabled(model):
            text = model.generate(**given, streamer=streamer, speculative=asked).tolist()
            texts.append((text, streamer.events, torch.rand(1).item()))
    assert texts[0] == texts[1]
    assert reason_of(model) is FallbackReason.MEMORY
    assert len(calls) > 2


def test_in_a_wide_step(engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is done without its draft, and later drafts are narrower."""
    model = tiny("llama")
    kind, widths = type(model.model), []
    forward = kind.forward

    def limited(self: Any, *args: Any, **kwargs: Any) -> Any:
        width = kwargs["input_ids"].shape[1]
        if kwargs[CACHE].get_seq_length():
            widths.append(width)
            if width > 4:
                raise torch.OutOfMemoryError("no memory")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", limited)
    call = {**GREEDY, **padded("left", 1)}
    stats = compared(model, lambda: dict(call), call["input_ids"].shape[1]).stats
    failed = [index for index, width in enumerate(widths) if width > 4]
    assert failed and all(widths[index + 1] == 1 for index in failed)
    assert len(failed) <= 4 and max(widths[failed[-1] + 1 :]) > 1
    assert stats.num_accepted > 0


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("do_sample", [False, True])
def test_behind_the_walk_on_a_device(
    do_sample: bool, replayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths that the device has advanced go back, and no such step tells what steps cost."""
    own, failed, calls, timed = decision.has_nan, [], itertools.count(1), []
    observe = DraftSession.observe

    def has_nan(logits: torch.Tensor) -> torch.Tensor:
        if next(calls) in (4, 7, 9, 12) and logits.shape[1] > 1:
            failed.append(len(timed))
            raise torch.OutOfMemoryError("no memory")
        return own(logits)

    def observed(drafts: DraftSession, *args: Any) -> None:
        timed.append(args[-1] is not None)
        observe(drafts, *args)

    monkeypatch.setattr(decision, "has_nan", has_nan)
    monkeypatch.setattr(DraftSession, "observe", observed)
    with taped(monkeypatch) if replayed else on_device(monkeypatch):
        compare(tiny("llama"), padded("left"), {"cuda_graphs": replayed}, do_sample=do_sample)
    assert len(failed) > 1 and not any(timed[step] for step in failed)
    assert any(timed)


def test_in_the_growth_of_a_layer(engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers that have grown and those that have not are of one size in the next step."""
    calls = fails_at(monkeypatch, Stores, "grow", 4, 7)
    monkeypatch.setattr(SlotGroup, "roomy", lambda group, slots: slots + 2)
    call = {**GREEDY, **padded("left")}
    compared(tiny("llama"), lambda: dict(call), call["input_ids"].shape[1])
    assert len(calls) > 7


def test_while_layers_drop_tokens(engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that have dropped theirs do not drop any more with the others."""
    calls = fails_at(monkeypatch, Stores, "drop", 2, 6)
    monkeypatch.setattr(SlotGroup, "roomy", lambda group, slots: slots + 2)
    call = {**GREEDY, **padded("left"), "max_new_tokens": 60}
    compared(tiny("mistral"), lambda: dict(call), call["input_ids"].shape[1])
    assert len(calls) > 6
