"""Interrupts, failing forwards and threads leave a usable model and cache behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import lookahead_hf
from tests.helpers.caches import CACHE
from tests.helpers.calls import padded
from tests.helpers.compared import speculated
from tests.helpers.device import on_device
from tests.helpers.models import prompt, tiny
from tests.helpers.random_calls import smallest
from tests.helpers.scripted import (
    RandomTrees,
    Scripted,
    continuations,
    right,
    scripted,
    second_child_right,
)

LENGTH = 16
SETTINGS: dict[str, Any] = {"max_new_tokens": LENGTH, "pad_token_id": 0, "top_k": 0}
ERRORS: dict[str, type[BaseException]] = {
    "processor": KeyboardInterrupt,
    "criterion": ValueError,
    "streamer": KeyboardInterrupt,
    "forward": RuntimeError,
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
    """Ticks with every column, and keeps it."""

    def __init__(self, bomb: Callable[[], None] = lambda: None) -> None:
        self.bomb = bomb
        self.columns: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.columns.append(value.tolist())
        if len(self.columns) > 1:  # the first is the prompt
            self.bomb()

    def end(self) -> None: ...


@contextmanager
def planted(model: Any, where: str, bomb: Bomb) -> Iterator[dict[str, Any]]:
    """A bomb at some place of a call, and what the call must be given for it."""
    handle = model.register_forward_pre_hook(bomb) if where == "forward" else None
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


@dataclass
class Left:
    """What a call that raised has left behind."""

    cache: Any
    generator: torch.Tensor
    columns: list[Any]


def broken_off(
    model: Any, call: dict[str, Any], where: str, at: int, is_static: bool = False, **ours: Any
) -> Left:
    """Let something raise in a call on a cache of the caller's, the `at`-th time that it can."""
    error = ERRORS[where]()
    cache = StaticCache(model.config, 64) if is_static else DynamicCache(config=model.config)
    call = {CACHE: cache, **call}
    streamer = Streamer()
    torch.manual_seed(3)
    with planted(model, where, Bomb(error, at)) as given, pytest.raises(type(error)) as raised:
        model.generate(**{"streamer": streamer, **call, **given, **ours})
    assert raised.value is error
    streamer = given.get("streamer", streamer)
    return Left(cache, torch.get_rng_state(), streamer.columns)


def assert_kept(ours: Left, plain: Left, columns: int) -> None:
    """The same was shown, the generators are alike, and the cache holds no more than was shown."""
    assert ours.columns == plain.columns
    assert torch.equal(ours.generator, plain.generator)
    lengths = {int(layer.get_seq_length()) for layer in ours.cache.layers}
    assert len(lengths) == 1
    assert max(lengths) < columns + len(ours.columns)


def assert_goes_on(model: Any, left: Left, call: dict[str, Any]) -> None:
    """The next turn on the cache writes what plain writes without any cache."""
    ids, shown = call["input_ids"], left.columns[1:]
    rows = len(ids)
    question = torch.cat(
        [ids, torch.tensor(shown, dtype=torch.long).view(-1, rows).T, prompt(rows, 3, seed=9)], 1
    )
    mask = torch.ones_like(question)
    mask[:, : ids.shape[1]] = call.get("attention_mask", 1)
    rest = {**call, "input_ids": question, "attention_mask": mask}
    texts = []
    for cache in ({}, {CACHE: left.cache}):
        torch.manual_seed(4)
        texts.append(model.generate(**rest, **cache).tolist())
    assert texts[1] == texts[0]


@pytest.mark.parametrize("where", ["processor", "criterion", "streamer", "forward"])
@pytest.mark.parametrize(
    ("kind", "rows", "do_sample", "script"),
    [
        ("llama", 3, True, second_child_right),
        ("gemma3", 1, False, right(3)),
        ("llama, static", 1, True, second_child_right),
        ("gemma3, static", 3, False, right(3)),
    ],
)
def test_a_call_that_raises(kind: str, rows: int, do_sample: bool, where: str, script: Any) -> None:
    """At every token of two steps: generator and model as plain leaves them, and a usable cache."""
    name, _, is_static = kind.partition(", ")
    model, call = smallest(name), {"do_sample": do_sample, **SETTINGS, "input_ids": prompt(rows)}
    torch.manual_seed(3)
    plain = model.generate(**call)
    found = traces(model)
    config = scripted(continuations(plain, 12), script)
    for at in (1, 3, 4) if where == "forward" else (1, 5, 6):
        with lookahead_hf.enabled(model):
            ours = broken_off(model, call, where, at, bool(is_static), speculative=config)
        assert traces(model) == found
        if where == "forward":  # as plain's forward behind the same token
            at = max(1, len(ours.columns))
        assert_kept(ours, broken_off(model, call, where, at, bool(is_static)), 12)
        assert_goes_on(model, ours, call)
    torch.manual_seed(3)
    with lookahead_hf.enabled(model):
        assert torch.equal(model.generate(**call, speculative=config), plain)
    speculated(model)
    torch.manual_seed(3)
    assert torch.equal(model.generate(**call), plain)


@pytest.mark.parametrize("engine", ["walk", "device"])
@pytest.mark.parametrize(("name", "do_sample"), [("llama", True), ("gemma3", False)])
def test_a_streamer_that_raises_where_rows_are_apart(
    do_sample: bool, name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows at steps of their own, of which some have ended: the cache ends before the column."""
    model, ids = smallest(name), prompt(3)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    call = {"input_ids": ids, "attention_mask": mask, "do_sample": do_sample, **SETTINGS}
    torch.manual_seed(3)
    plain = model.generate(**call)
    call["eos_token_id"] = [int(plain[0, 15]), int(plain[1, 20])]
    torch.manual_seed(3)
    plain = model.generate(**call)
    assert (plain[:, 21:] == 0).all(1).any()
    with lookahead_hf.enabled(model), ExitStack() as stack:
        if engine == "device":
            stack.enter_context(on_device(monkeypatch))
        for at in range(1, plain.shape[1] - 11):
            config = scripted(continuations(plain, 12), RandomTrees(at))
            ours = broken_off(model, call, "streamer", at, speculative=config)
            assert_kept(ours, broken_off(model, call, "streamer", at, speculative=False), 12)
            assert_goes_on(model, ours, call)
        torch.manual_seed(3)
        assert torch.equal(model.generate(**call, speculative=config), plain)
    assert speculated(model).engine == engine


@pytest.mark.parametrize(("where", "rows"), [("processor", 1), ("criterion", 3), ("streamer", 3)])
def test_a_decoder_beside_an_encoder(rows: int, where: str) -> None:
    """What the encoder left in the cache stays, and the decoder's part holds whole steps."""
    model = tiny("bart").double()
    call = {**padded("right", rows), "do_sample": True, **SETTINGS}
    torch.manual_seed(3)
    config = scripted(continuations(model.generate(**call), 1), second_child_right)
    for at in (4, 5):
        caches = [EncoderDecoderCache(DynamicCache(), DynamicCache()) for _ in range(2)]
        with lookahead_hf.enabled(model):
            given = {**call, CACHE: caches[0], "speculative": config}
            ours = broken_off(model, given, where, at)
        plain = broken_off(model, {**call, CACHE: caches[1]}, where, at)
        read = [cache.cross_attention_cache for cache in caches]
        for mine, theirs in zip(read[0].layers, read[1].layers, strict=True):
            assert torch.allclose(mine.keys, theirs.keys, rtol=0, atol=1e-9)
        ours.cache = caches[0].self_attention_cache
        assert_kept(ours, plain, 1)


class Interrupted(Scripted):
    """A drafter at whose work the user presses ctrl-C."""

    def propose(self, rows: Any, max_nodes: int) -> Any:
        raise KeyboardInterrupt


def test_an_interrupt_while_drafting_is_the_callers() -> None:
    model = smallest("llama")
    config = lookahead_hf.SpeculativeConfig((Interrupted([[]], right(1)),), budget=8)
    found = traces(model)
    with lookahead_hf.enabled(model), pytest.raises(KeyboardInterrupt):
        model.generate(prompt(), **SETTINGS, speculative=config)
    assert traces(model) == found
