"""Whatever a call asks for, it gets what plain `generate` gives: random calls, compared in full."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from tests.fakes import Recorder
from tests.models import prompt
from tests.random_calls import RandomCall, calls, smallest
from tests.scripted import RandomTrees, Scripted, continuations


@dataclass
class Tally:
    """What all calls of a run did together."""

    num_calls: int = 0
    num_accepted: int = 0
    num_moved: int = 0
    num_raised: int = 0
    engines: Counter[str | None] = field(default_factory=Counter)


@pytest.mark.parametrize("num_calls", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_call_gets_what_plain_gives_it(
    num_calls: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("ERROR", "transformers")  # which warns of many a setting
    tally = Tally()

    @settings(
        max_examples=num_calls,
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(call=calls())
    def agrees(call: RandomCall) -> None:
        compare(call, tally)

    agrees()
    assert tally.num_calls >= num_calls
    assert tally.num_accepted > 3 * tally.num_calls
    assert tally.num_moved > tally.num_calls / 2
    assert tally.num_raised < tally.num_calls / 10
    assert min(tally.engines["walk"], tally.engines["lockstep"]) > tally.num_calls / 10


def compare(call: RandomCall, tally: Tally) -> None:
    """Run all turns of a call both ways; both must return the same, or raise the same."""
    tally.num_calls += 1
    model = smallest(call.model)
    ids = torch.tensor(call.prompt)
    plain_cache, our_cache = call.new_cache(), call.new_cache()
    for turn in range(max(1, call.turns)):
        seed, columns = call.seed + turn, 0 if call.embeds else ids.shape[1]
        plain = run(model, call.arguments(ids), seed, plain_cache)
        truths = [[]] * 16 if plain.error else continuations(plain.sequences, columns)
        drafter = Scripted(truths, RandomTrees(call.drafts + turn))
        fields = {"budget": call.budget, "draft_invariant": call.draft_invariant}
        config = SpeculativeConfig((drafter,), **fields)
        with lookahead_hf.enabled(model):
            ours = run(model, call.arguments(ids), seed, our_cache, speculative=config)
        assert ours.error == plain.error
        if plain.error:
            tally.num_raised += 1
            return
        assert_same(ours, plain, call)
        count(model, tally)
        ids = torch.cat([plain.sequences, prompt(len(plain.sequences), 3, seed=call.seed)], 1)


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
        arguments["past_key_values"] = cache
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what transformers says of some settings
        try:
            output = model.generate(**arguments, streamer=streamer, **ours)
        except (RuntimeError, ValueError, TypeError, IndexError) as raised:
            error = f"{type(raised).__name__}: {raised}"
    if cache is None and output is not None and not isinstance(output, torch.Tensor):
        cache = output.past_key_values
    return Ran(output, error, streamer.events, torch.get_rng_state(), cache)


def assert_same(ours: Ran, plain: Ran, call: RandomCall) -> None:
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert ours.streamed == plain.streamed
    assert torch.equal(ours.generator, plain.generator)
    if not isinstance(plain.output, torch.Tensor):
        assert ours.output.keys() == plain.output.keys()
        for name in ("scores", "logits", "hidden_states"):
            assert_close(ours.output.get(name), plain.output.get(name))
    if plain.cache is not None:
        assert_same_cache(ours.cache, plain.cache, call)


def assert_close(ours: Any, plain: Any) -> None:
    """The same tuples of tensors, up to what rounding leaves of double precision."""
    if isinstance(plain, tuple):
        assert len(ours) == len(plain)
        for a, b in zip(ours, plain, strict=True):
            assert_close(a, b)
    elif plain is not None:
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6, equal_nan=True)
    else:
        assert ours is None


def assert_same_cache(ours: Any, plain: Any, call: RandomCall) -> None:
    """The same columns, wherever a column is attended."""
    columns = plain.get_seq_length()
    assert ours.get_seq_length() == columns
    mask = torch.ones(plain.layers[0].keys.shape[0], columns)
    if call.mask is not None:
        given = torch.tensor(call.mask).repeat_interleave(len(mask) // len(call.mask), 0)
        mask[:, : given.shape[1]] = given
    for a, b in zip(ours.layers, plain.layers, strict=True):
        held = mask[:, -b.keys.shape[2] :, None].transpose(1, 2)[..., None]
        torch.testing.assert_close(a.keys * held, b.keys * held, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(a.values * held, b.values * held, rtol=1e-6, atol=1e-6)


def count(model: Any, tally: Tally) -> None:
    stats = lookahead_hf.last_stats(model)
    assert stats is not None
    assert stats.fallback_reason is None
    tally.num_accepted += stats.num_accepted
    tally.num_moved += stats.num_moved
    tally.engines[stats.engine] += 1
