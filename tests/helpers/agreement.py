"""Compares random calls with plain `generate`."""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from transformers import EncoderDecoderCache

import lookahead_hf
from lookahead_hf import SpeculativeConfig, SpeculativeStats
from lookahead_hf.trace import MODEL, PARTS, TraceRow
from tests.helpers import random_calls
from tests.helpers.caches import CACHE, assert_same_cache
from tests.helpers.compared import assert_close, served
from tests.helpers.compiled import in_threads
from tests.helpers.fakes import Recorder
from tests.helpers.models import prompt
from tests.helpers.random_calls import PAIRS, RandomCall
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
    "bfloat16": lambda call: call.half == "bfloat16",
    "float16": lambda call: call.half == "float16",
    "prompts by kernels": lambda call: call.compiled == "everywhere",
    "eager": lambda call: call.attn == "eager",
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
    "traced": lambda call: call.trace and call.way == "call",
    "traced on a device": lambda call: call.trace and call.way == "device",
    "in turn": lambda call: call.way == "queue" and len(call.prompt) > call.max_slots,
}
"""What must be among the calls that speculate."""


def compare(call: RandomCall, tally: Tally) -> None:
    """Run a call both ways; both must return the same, or raise the same."""
    tally.num_calls += 1
    with warnings.catch_warnings(), way_of(call), lookahead_hf.enabled(call.target) as model:
        warnings.simplefilter("ignore", UserWarning)  # what transformers says of some settings
        (compare_requests if call.way == "queue" else compare_turns)(model, call, tally)


@contextmanager
def way_of(call: RandomCall) -> Iterator[None]:
    """Let calls run on a stand-in for a device, if this one does."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if call.way in ("device", "graphs") and random_calls.device.type == "cpu":
            device = importlib.import_module("tests.helpers.device")
            patch.setattr("lookahead_hf.engines.cuda.graphs.WIDTHS", (16, 4, 1))
            stack.enter_context((device.taped if call.way == "graphs" else device.on_device)(patch))
        yield


def compare_turns(model: Any, call: RandomCall, tally: Tally) -> None:
    ids = torch.tensor(call.prompt, device=random_calls.device)
    plain_cache, our_cache = call.new_cache(), call.new_cache()
    addresses: list[int] = []
    for turn in range(max(1, call.turns)):
        undrafted = {"speculative": configuration(call, Scripted([[]] * 16, empty))}
        extra = undrafted if call.is_rounded else {}
        plain = run(model, call, ids, call.seed + turn, plain_cache, **extra)
        truths = [[]] * 16
        if not plain.error:
            truths = continuations(plain.sequences, call.columns(ids))
        speculate = partial(speculated, model, call, ids, turn, our_cache, truths)
        found = in_threads(speculate, speculate) if call.way == "threads" else [speculate()]
        for ours in found:
            assert ours.error == plain.error
            if not plain.error:
                assert_same(ours, plain, call)
        if plain.error:
            tally.num_raised += 1
            return
        count(served(model), tally, call)
        if call.trace:
            check_trace(served(model), truths)
        if call.is_static:  # whose tensors stay where they are
            layers = (layer for layer in our_cache.layers if layer.keys is not None)
            now = [layer.keys.data_ptr() for layer in layers]
            addresses = addresses or now
            assert now == addresses
        more = prompt(len(plain.sequences), 3, seed=call.seed).to(random_calls.device)
        ids = torch.cat([plain.sequences, more], 1)


def compare_requests(model: Any, call: RandomCall, tally: Tally) -> None:
    """Compare each text of a queue with that of `generate` for its prompt alone."""
    requests = importlib.import_module("tests.helpers.requests")
    masks = call.mask or [[1] * len(row) for row in call.prompt]
    rows = zip(call.prompt, masks, strict=True)
    texts = [[token for token, kept in zip(*row, strict=True) if kept] for row in rows]
    settings = dict(call.settings)
    settings.pop("prefix_allowed_tokens", None)

    def objects() -> dict[str, Any]:
        given = call.arguments(torch.tensor(call.prompt, device=random_calls.device))
        return {name: given[name] for name in OBJECTS if name in given}

    try:
        config = requests.settings(model, max_new_tokens=call.max_new_tokens, **settings)
        plain = [
            requests.alone(model, text, config, at, **objects()) for at, text in enumerate(texts)
        ]
    except ERRORS:
        tally.num_raised += 1
        return
    lookahead_hf.set_default(model, configuration(call))
    with requests.running(model, config, max_slots=call.max_slots) as manager:
        with manager.pause():
            names = [manager.add_request(text, **objects()) for text in texts]
        found = requests.results(manager, len(texts))
    assert [found[name].generated_tokens for name in names] == plain
    for name in names:
        count(found[name].speculative_stats, tally, call)


def speculated(
    model: Any, call: RandomCall, ids: torch.Tensor, turn: int, cache: Any, truths: list[list[int]]
) -> Ran:
    """Run one turn of a call with drafts; `truths` is what plain writes, per row."""
    extra: dict[str, Any] = {"speculative": configuration(call)}
    if call.drafting == "scripted":
        drafter = Scripted(truths, RandomTrees(call.drafts + turn))
        extra = {"speculative": configuration(call, drafter)}
    elif call.drafting == "prediction":
        extra["prediction"] = truths[0][:3] + truths[0][4:]
    elif call.drafting == "pool":
        extra = {"speculative": configuration(call, "pool")}
    return run(model, call, ids, call.seed + turn, cache, **extra)


def configuration(call: RandomCall, *drafters: Any) -> SpeculativeConfig:
    return SpeculativeConfig(
        drafters or None,
        learn="pool" in drafters,
        budget=call.budget,
        draft_invariant=call.draft_invariant,
        compiled_layers=call.compiled,
        cuda_graphs=call.way == "graphs"
        or (call.seed % 2 == 1 and random_calls.device.type == "cuda"),
        trace=call.trace,
    )


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


def run(model: Any, call: RandomCall, ids: torch.Tensor, seed: int, cache: Any, **ours: Any) -> Ran:
    """Run one turn of a call, on a cache of the caller's if there is one."""
    arguments, streamer, output, error = call.arguments(ids), Recorder(), None, None
    if cache is not None:
        arguments[CACHE] = cache
    torch.manual_seed(seed)
    with call.cast():  # which is a thread's own
        try:
            output = model.generate(**arguments, streamer=streamer, **ours)
        except ERRORS as raised:
            error = f"{type(raised).__name__}: {raised}"
    if cache is None and output is not None and not isinstance(output, torch.Tensor):
        cache = output[CACHE]
    state = (torch.cuda if random_calls.device.type == "cuda" else torch).get_rng_state()
    return Ran(output, error, streamer.events, state, cache)


ERRORS = (RuntimeError, ValueError, TypeError, IndexError)
"""What plain `generate` may raise at settings that do not go together."""

OBJECTS = ("logits_processor", "prefix_allowed_tokens_fn")
"""What a request may bring beside settings."""

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
    rows = next(len(layer.keys) for layer in plain.layers if hasattr(layer, "keys"))
    mask = torch.ones(rows, int(plain.get_seq_length()))
    if call.mask is not None and call.model not in PAIRS:
        given = torch.tensor(call.mask).repeat_interleave(len(mask) // len(call.mask), 0)
        mask[:, : given.shape[1]] = given
    near = 1e-6 if random_calls.device.type == "cpu" else 2e-5  # float32 angles differ there
    assert_same_cache(ours, plain, mask, atol=near, rtol=near)


def count(stats: SpeculativeStats, tally: Tally, call: RandomCall) -> None:
    tally.num_accepted += stats.num_accepted
    tally.num_moved += stats.num_moved
    tally.engines[stats.engine] += 1
    about = [name for name, holds in ABOUT.items() if holds(call)]
    for name in (call.model, call.drafting, call.way, *about):
        tally.accepted[name] += stats.num_accepted


def check_trace(stats: SpeculativeStats, texts: list[list[int]]) -> None:
    """Assert that a trace agrees with what its call emitted and counted.

    Args:
        stats: The statistics, with a trace.
        texts: The generated columns of each row, with pads.
    """
    trace = stats.trace
    assert trace is not None and trace.fallback_reason is None
    assert (trace.num_rows, len(trace.steps)) == (stats.rows, stats.num_steps + 1)
    for row, (counts, text) in enumerate(zip(stats.row_stats, texts, strict=True)):
        tokens, origins = trace.tokens(row), trace.origins(row)
        assert len(tokens) == counts.num_emitted
        assert tokens[: len(text)] == text[: len(tokens)]  # without a pad token, the shortest's
        assert len(origins) - origins.count(MODEL) == counts.num_accepted
    traced = [each for step in trace.steps[1:] for each in step.rows]
    assert len(traced) == stats.row_steps
    assert sum(len(each.nodes) for each in traced) == stats.num_drafted
    for each in traced:
        check_row(each)
    for part in PARTS:
        spent = sum(step.parts.get(part, 0.0) for step in trace.steps)
        assert spent == pytest.approx(getattr(stats, f"{part}_ms"), abs=1e-6)
    ends = [step.start_ms + step.total_ms for step in trace.steps]
    assert [step.start_ms for step in trace.steps] == pytest.approx([0.0, *ends[:-1]])
    assert all(sum(step.parts.values()) <= step.total_ms + 1e-6 for step in trace.steps)


def check_row(each: TraceRow) -> None:
    """Assert that the accepted nodes are a path from the root whose tokens were emitted."""
    assert len(each.tokens) == len(each.accepted) + 1
    at = -1
    for index, token in zip(each.accepted, each.tokens, strict=False):
        node = each.nodes[index]
        assert (node.parent, node.token) == (at, token)
        at = index
    for index, node in enumerate(each.nodes):
        assert -1 <= node.parent < index
        above = 0 if node.parent == -1 else each.nodes[node.parent].depth
        assert node.depth == above + 1
        assert node.sources == ("scripted",)
        assert node.probability is not None and 0 <= node.probability <= 1
