"""Compares random calls with plain `generate`."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import EncoderDecoderCache

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from tests.helpers.caches import CACHE, assert_same_cache
from tests.helpers.compared import served
from tests.helpers.fakes import Recorder
from tests.helpers.models import prompt
from tests.helpers.outputs import assert_close
from tests.helpers.random_calls import (
    MODELS,
    RandomCall,
)
from tests.helpers.scripted import RandomTrees, Scripted, continuations, empty


@dataclass
class Tally:
    """What all calls of a run did together."""

    num_calls: int = 0
    num_accepted: int = 0
    num_moved: int = 0
    num_raised: int = 0
    engines: Counter[str | None] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)  # by what the call is about


ABOUT: dict[str, Callable[[RandomCall], bool]] = {
    "half": lambda call: call.is_half,
    "autocast": lambda call: call.autocast == "bfloat16",
    "autocast to float16": lambda call: call.autocast == "float16",
    "invariant": lambda call: call.draft_invariant,
    "static": lambda call: call.is_static,
    "named": lambda call: "cache_implementation" in call.settings,
    "chunks": lambda call: "prefill_chunk_size" in call.settings,
    "positions": lambda call: call.spacing > 0,
    "embeds": lambda call: call.embeds,
    "turns": lambda call: call.turns > 1,
    "edited text": lambda call: "edits" in call.own,
    "edited token": lambda call: call.stop is not None and call.stop[0] == "edits",
    "allowed tokens": lambda call: "prefix_allowed_tokens" in call.settings,
}
"""What must be among the calls that speculate."""


def compare(call: RandomCall, tally: Tally) -> None:
    """Run all turns of a call both ways; both must return the same, or raise the same."""
    tally.num_calls += 1
    ids = torch.tensor(call.prompt)
    plain_cache, our_cache = call.new_cache(), call.new_cache()
    addresses: list[int] = []
    with lookahead_hf.enabled(call.target) as model, call.cast():
        for turn in range(max(1, call.turns)):
            seed = call.seed + turn
            undrafted = {"speculative": configuration(call, Scripted([[]] * 16, empty))}
            extra = undrafted if call.is_rounded else {}
            plain = run(model, call.arguments(ids), seed, plain_cache, **extra)
            truths = [[]] * 16
            if not plain.error:
                truths = continuations(plain.sequences, call.columns(ids))
            extra = drafted(call, truths, turn)
            ours = run(model, call.arguments(ids), seed, our_cache, **extra)
            assert ours.error == plain.error
            if plain.error:
                tally.num_raised += 1
                return
            assert_same(ours, plain, call)
            count(model, tally, call)
            if call.is_static:  # whose tensors stay where they are
                now = [layer.keys.data_ptr() for layer in our_cache.layers]
                addresses = addresses or now
                assert now == addresses
            more = prompt(len(plain.sequences), 3, seed=call.seed)
            ids = torch.cat([plain.sequences, more], 1)


def drafted(call: RandomCall, truths: list[list[int]], turn: int) -> dict[str, Any]:
    """What a call adds to plain's arguments; `truths` is what plain writes, per row."""
    if call.drafting == "scripted":
        drafter = Scripted(truths, RandomTrees(call.drafts + turn))
        return {"speculative": configuration(call, drafter)}
    if call.drafting == "prediction":
        first = truths[0]
        return {"speculative": configuration(call), "prediction": first[:3] + first[4:]}
    if call.drafting == "default":
        return {"speculative": configuration(call)}
    return {"speculative": configuration(call, call.drafting)}


def configuration(call: RandomCall, *drafters: Any) -> SpeculativeConfig:
    fields = {"budget": call.budget, "draft_invariant": call.draft_invariant}
    return SpeculativeConfig(drafters or None, learn="pool" in drafters, **fields)


@dataclass
class Ran:
    """What a call returned or raised, fed its streamer, and left behind."""

    output: Any
    error: str | None
    streamed: list[Any]
    generator: torch.Tensor
    cache: Any

    @property
    def sequences(self) -> torch.Tensor:
        return self.output if isinstance(self.output, torch.Tensor) else self.output.sequences


def run(model: Any, arguments: dict[str, Any], seed: int, cache: Any, **ours: Any) -> Ran:
    streamer, output, error = Recorder(), None, None
    if cache is not None:
        arguments[CACHE] = cache
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what transformers says of some settings
        try:
            output = model.generate(**arguments, streamer=streamer, **ours)
        except (RuntimeError, ValueError, TypeError, IndexError) as raised:
            error = f"{type(raised).__name__}: {raised}"
    if cache is None and output is not None and not isinstance(output, torch.Tensor):
        cache = output[CACHE]
    return Ran(output, error, streamer.events, torch.get_rng_state(), cache)


OUTPUT = ("scores", "logits", "hidden_states")


def assert_same(ours: Ran, plain: Ran, call: RandomCall) -> None:
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert ours.streamed == plain.streamed
    assert torch.equal(ours.generator, plain.generator)
    if not isinstance(plain.output, torch.Tensor):
        assert ours.output.keys() == plain.output.keys()
        for name in (*OUTPUT, *(f"decoder_{name}" for name in OUTPUT), "encoder_hidden_states"):
            assert_close(ours.output.get(name), plain.output.get(name), atol=1e-6, rtol=1e-5)
    if plain.cache is not None:
        assert_columns(ours.cache, plain.cache, call)


def assert_columns(ours: Any, plain: Any, call: RandomCall) -> None:
    """The same columns, wherever a column is attended."""
    if isinstance(plain, EncoderDecoderCache):
        ours, plain = ours.self_attention_cache, plain.self_attention_cache
    mask = torch.ones(len(plain.layers[0].keys), int(plain.get_seq_length()))
    if call.mask is not None and call.model in MODELS:
        given = torch.tensor(call.mask).repeat_interleave(len(mask) // len(call.mask), 0)
        mask[:, : given.shape[1]] = given
    assert_same_cache(ours, plain, mask, atol=1e-6, rtol=1e-6)


def count(model: Any, tally: Tally, call: RandomCall) -> None:
    stats = served(model)
    tally.num_accepted += stats.num_accepted
    tally.num_moved += stats.num_moved
    tally.engines[stats.engine] += 1
    about = [name for name, holds in ABOUT.items() if holds(call)]
    for name in (call.model, call.drafting, *about):
        tally.accepted[name] += stats.num_accepted
