"""Compile, pack and measure ahead of the first call, instead of during it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from lookahead_hf import compat
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting.cost_model import SIZES
from lookahead_hf.drafting.memory import memory_of, placement
from lookahead_hf.drafting.session import compile_or_warn
from lookahead_hf.fallback import Unserved
from lookahead_hf.rows import Rows
from lookahead_hf.runner import attention, implicit_positions, positions, support
from lookahead_hf.runner.cuda.runner import CudaRunner
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.outputs import DeviceOutputs, Scores
from lookahead_hf.runner.packed_steps import LONG_CALL, PackedSteps
from lookahead_hf.runner.recurrent import layers as recurrent
from lookahead_hf.verification import device
from lookahead_hf.wrappers import unwrap

REPEATS = 5


def warm_up(
    model: Any,
    *,
    batch_size: int = 1,
    context_length: int = 256,
    max_draft_nodes: int = 64,
    max_new_tokens: int = 256,
    do_sample: bool = False,
    packed_weights: str | bool = "auto",
) -> None:
    """Compile, pack weights, capture steps, and measure what draft tokens cost this model.

    Without it the first calls draft by prompt lookup until numba has compiled (seconds, once per
    installation), the first steps of a model find out what they cost, weights on a CPU are packed
    in the first long call or after some steps, and steps on a GPU are captured in a call.

    Args:
        model: The model that will generate.
        batch_size: Rows of the calls to come.
        context_length: Tokens of their texts, roughly: costs are told apart by powers of two. What
            a model has no positions for is not tried.
        max_draft_nodes: Most draft tokens per row, as in the configuration.
        max_new_tokens: Tokens that calls on a GPU may write behind such a text. What is captured
            serves all calls that need no more room.
        do_sample: Whether such calls sample or have logits processors: then only the forward is
            captured. What is captured serves one of the two kinds.
        packed_weights: That of the calls to come, as in `SpeculativeConfig`. With True the weights
            on a GPU move, so that what is captured serves such calls.

    Raises:
        ValueError: A number that is no int from 1 on, another value of `packed_weights` than a
            configuration takes, or no model in `model`.
    """
    for name, value in (
        ("batch_size", batch_size),
        ("context_length", context_length),
        ("max_draft_nodes", max_draft_nodes),
        ("max_new_tokens", max_new_tokens),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an int from 1 on, not {value!r}")
    packs = SpeculativeConfig(packed_weights=packed_weights).packed_weights
    model = unwrap(model)
    compile_or_warn()
    try:
        support.check_setup(model)
        support.check_kind(model)
        support.check_trial(model)
    except Unserved:
        return  # its calls will run plain generate
    if model.config.is_encoder_decoder:
        return  # what its steps cost is learned in its calls
    room = positions.room(model)
    if room is not None:
        max_draft_nodes = min(max_draft_nodes, room // 2)
        context_length = max(1, min(context_length, room - 1 - max_draft_nodes))
        max_new_tokens = max(1, min(max_new_tokens, room - context_length))
    runner = _runner(model, batch_size, max_new_tokens, do_sample, packs)
    try:
        _measure(runner, context_length, min(max_draft_nodes, runner.most_nodes or max_draft_nodes))
    finally:
        runner.end()


def _runner(
    model: Any, num_rows: int, max_new_tokens: int, do_sample: bool, packs: str | bool
) -> Runner:
    """What will run the steps of calls like these."""
    nothing = torch.empty(num_rows, 0, device=model.device)
    if device.serves(model.device) and support.on_device(model, nothing):
        scoring = _unaltered if do_sample else None
        given: dict[str, Any] = {"room": max_new_tokens, "joins_layers": packs is True}
        return CudaRunner(model, num_rows, scoring=scoring, **given)
    is_flat = num_rows > 1 and support.takes_flat(model, torch.zeros(num_rows, 1), {})
    packed = PackedSteps(model, packs, LONG_CALL)
    return Runner(model, num_rows, packed=packed, flat=is_flat)


def _unaltered(rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Scores:
    return Scores(logits.to(copy=True, dtype=torch.float32))


@torch.no_grad()
def _measure(runner: Runner, context_length: int, most_nodes: int) -> None:
    """Time steps of every size, the sizes in turn, so that a disturbance hits all of them."""
    model, num_rows = runner.model, runner.num_rows
    vocab = int(compat.text_config(model).vocab_size)
    ids = np.random.default_rng(0).integers(0, vocab, (num_rows, context_length))
    rows = Rows(ids)
    columns, states = implicit_positions.laid_under(model), recurrent.laid_under(model)
    with attention.laid_under(model), columns, states:
        prompt = torch.from_numpy(ids).to(model.device)
        cache = compat.DynamicCache(config=model.config)
        runner.start(prompt, cache, position_ids=compat.text_positions(model, prompt))
        for row in range(num_rows):
            rows.emit(row, int(ids[row, 0]))
        if isinstance(runner, CudaRunner):
            runner.capture()
        else:
            _time_step(runner, rows, ids[0, 0] % vocab, 0)  # packs weights
        setting = num_rows, context_length, placement(model), runner.mode, runner.sizes
        curve = memory_of(model).costs.curve(*setting, runner.is_flat)
        if runner.is_flat:  # nothing is kept of greater blocks
            most_nodes = max(0, min(most_nodes, curve.sizes[-1] // num_rows - 1))
        known = SIZES if runner.is_flat else curve.sizes
        counts = {min(size, most_nodes) for size in known}
        for turn in range(REPEATS + 1):
            # Downwards, since a step after a much larger one takes longer.
            for count in sorted(counts, reverse=True):
                seconds = _time_step(runner, rows, ids[0, 0] % vocab, count)
                if turn:  # the first of a shape allocates
                    size = (1 + count) * num_rows if runner.is_flat else count
                    curve.observe(size, seconds)


def _time_step(runner: Runner, rows: Rows, token: int, num_nodes: int) -> float:
    """Seconds of a step that verifies a chain of `num_nodes` in every row and keeps nothing."""
    draft = DraftTree.from_chains([[[token] * num_nodes]] * rows.num_rows)
    start = time.perf_counter()
    step = runner.launch(rows, draft)
    if isinstance(runner, CudaRunner) and isinstance(step, DeviceOutputs):
        step.walk.take()
        seconds = time.perf_counter() - start
        runner.forget()
        return seconds
    step.logits[:, -1, -1].cpu()  # waits for the device
    return time.perf_counter() - start
