"""Interrupts, failing forwards and threads: everything is left behind as plain would leave it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import lookahead_hf
from tests.models import prompt
from tests.random_calls import smallest
from tests.scripted import RandomTrees, Scripted, continuations, right, scripted

LENGTH = 16
SETTINGS: dict[str, Any] = {"max_new_tokens": LENGTH, "pad_token_id": 0, "top_k": 0}
ERRORS: dict[str, type[BaseException]] = {
    "processor": KeyboardInterrupt,
    "criterion": ValueError,
    "streamer": KeyboardInterrupt,
    "forward": torch.OutOfMemoryError,
    "layer": RuntimeError,
}
"""Places of a call, and what is raised there."""


class Bomb:
    """Raises an error the n-th time that it is ticked; afterwards it does nothing."""

    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.left = error, at

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


class Processor(LogitsProcessor):
    def __init__(self, bomb: Bomb) -> None:
        self.bomb = bomb

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.bomb()
        return scores


class Criterion(StoppingCriteria):
    def __init__(self, bomb: Bomb) -> None:
        self.bomb = bomb

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.bomb()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Streamer(BaseStreamer):
    """Ticks with every token, and notes where the default generator stands by then."""

    def __init__(self, bomb: Callable[[], None] = lambda: None) -> None:
        self.bomb = bomb
        self.states: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        self.states.append(torch.get_rng_state())
        if len(self.states) > 1:  # the first is the prompt
            self.bomb()

    def end(self) -> None: ...


@contextmanager
def planted(model: Any, where: str, bomb: Bomb) -> Iterator[dict[str, Any]]:
    """A bomb at some place of a call, and what the call must be given for it."""
    places: dict[str, Callable[[], Any]] = {
        "forward": lambda: model.register_forward_pre_hook(bomb),
        "layer": lambda: model.model.layers[0].register_forward_hook(bomb),
    }
    handle = places[where]() if where in places else None
    given: dict[str, Callable[[], dict[str, Any]]] = {
        "processor": lambda: {"logits_processor": LogitsProcessorList([Processor(bomb)])},
        "criterion": lambda: {"stopping_criteria": StoppingCriteriaList([Criterion(bomb)])},
        "streamer": lambda: {"streamer": Streamer(bomb)},
    }
    try:
        yield given.get(where, dict)()
    finally:
        if handle is not None:
            handle.remove()


def traces(model: Any) -> tuple[Any, ...]:
    """What a call may not leave on a model, other than its text."""
    hooks = [
        (len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()
    ]
    names = [set(vars(module)) for module in model.modules()]
    return model.config.to_dict(), model.config._attn_implementation, hooks, names


def index_of(state: torch.Tensor, states: list[torch.Tensor]) -> int:
    """After how many tokens the generator stood so."""
    return next(index for index, known in enumerate(states) if torch.equal(known, state))


def failed(
    model: Any, call: dict[str, Any], where: str, error: BaseException, at: int, **ours: Any
) -> tuple[DynamicCache, torch.Tensor]:
    """The cache and the generator after a call on a cache of the caller's that raised."""
    cache = DynamicCache(config=model.config)
    torch.manual_seed(3)
    with planted(model, where, Bomb(error, at)) as given, pytest.raises(type(error)) as raised:
        model.generate(**call, **given, past_key_values=cache, **ours)
    assert raised.value is error
    return cache, torch.get_rng_state()


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("where", ERRORS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_call_that_raises(where: str, at: int, rows: int, do_sample: bool) -> None:
    model, error = smallest("llama"), ERRORS[where]()
    call = {"input_ids": prompt(rows), "do_sample": do_sample, **SETTINGS}
    streamer = Streamer()
    torch.manual_seed(3)
    plain = model.generate(**call, streamer=streamer)
    found = traces(model)
    plain_cache, plain_state = failed(model, call, where, error, at)
    config = scripted(continuations(plain, 12), right(3))
    with lookahead_hf.enabled(model):
        cache, state = failed(model, call, where, error, at, speculative=config)
    assert traces(model) == found
    drawn, plain_drawn = (index_of(each, streamer.states) for each in (state, plain_state))
    if where in ("processor", "criterion") or at == 1:
        assert drawn == plain_drawn
    else:  # behind all tokens that were decided: a step decides several before any is shown
        assert drawn >= plain_drawn
    assert_usable(model, cache, plain_cache, plain)
    torch.manual_seed(3)
    with lookahead_hf.enabled(model):
        assert torch.equal(model.generate(**call, speculative=config), plain)
    assert accepted(model) > 0
    torch.manual_seed(3)
    assert torch.equal(model.generate(**call), plain)


def assert_usable(model: Any, cache: Any, plain_cache: Any, text: torch.Tensor) -> None:
    """The cache holds the text up to some token, the prompt at least, and goes on from there."""
    held = cache.get_seq_length()
    assert held >= min(12, plain_cache.get_seq_length())
    if len({layer.get_seq_length() for layer in cache.layers}) > 1:
        # The prompt's own forward stopped between two layers, where plain's call left it too.
        pairs = zip(cache.layers, plain_cache.layers, strict=True)
        assert all(a.get_seq_length() == b.get_seq_length() for a, b in pairs)
        return
    ids = text[:, : max(12, held + 1)]
    call = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    expected = model.generate(ids, **call)
    assert torch.equal(model.generate(ids, past_key_values=cache, **call), expected)


def accepted(model: Any) -> int:
    stats = lookahead_hf.last_stats(model)
    assert stats is not None
    assert stats.fallback_reason is None
    return stats.num_accepted


class Interrupted(Scripted):
    """A drafter at whose work the user presses ctrl-C."""

    def propose(self, rows: Any, max_nodes: int) -> Any:
        raise KeyboardInterrupt


def test_an_interrupt_while_drafting_is_the_callers() -> None:
    model = smallest("llama")
    call = {"input_ids": prompt(), "do_sample": True, **SETTINGS}
    config = lookahead_hf.SpeculativeConfig((Interrupted([[]], right(1)),), budget=8)
    found = traces(model)
    streamer = Streamer()
    torch.manual_seed(3)
    plain = model.generate(**call, streamer=streamer)
    torch.manual_seed(3)
    with lookahead_hf.enabled(model), pytest.raises(KeyboardInterrupt):
        model.generate(**call, speculative=config)
    assert index_of(torch.get_rng_state(), streamer.states) == 1
    assert traces(model) == found
    torch.manual_seed(3)
    assert torch.equal(model.generate(**call), plain)


def test_sampled_greedy_plain_and_failing_calls_at_once() -> None:
    """One call samples, so that its numbers are its own; the others keep out of its way."""
    model, error = smallest("gemma3"), KeyboardInterrupt()
    found = traces(model)
    ids = [prompt(1 + index % 2, seed=index) for index in range(5)]
    calls: list[dict[str, Any]] = [
        {"input_ids": each, "do_sample": index == 0, **SETTINGS, "max_new_tokens": 40}
        for index, each in enumerate(ids)
    ]
    torch.manual_seed(3)
    alone = [model.generate(**call) for call in calls]
    after = torch.get_rng_state()
    got: dict[int, Any] = {}
    barrier = threading.Barrier(len(calls))

    def work(index: int) -> None:
        config = scripted(continuations(alone[index], 12), RandomTrees(index))
        given: dict[str, Any] = {} if index == 1 else {"speculative": config}
        if index == 2:
            given["streamer"] = Streamer(Bomb(error, 9))
        barrier.wait()
        try:
            got[index] = model.generate(**calls[index], **given)
            assert index == 1 or accepted(model) > 0
        except BaseException as raised:
            got[index] = raised

    torch.manual_seed(3)
    with lookahead_hf.enabled(model):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got.pop(2) is error
    for index, output in got.items():
        assert torch.equal(output, alone[index])
    assert torch.equal(torch.get_rng_state(), after)
    assert traces(model) == found


def test_samples_drawn_at_once_share_no_numbers() -> None:
    model = smallest("llama")
    call = {"input_ids": prompt(2), "do_sample": True, **SETTINGS, "temperature": 1.5}
    texts: list[list[int]] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        texts.extend(model.generate(**call, speculative=True)[:, 12:].tolist())

    with lookahead_hf.enabled(model):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len({tuple(text) for text in texts}) == 8
