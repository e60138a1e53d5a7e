"""Compiles, prepares and measures before the first call instead of during it."""

from __future__ import annotations

import math
import time
from itertools import product
from typing import Any

import numpy as np
import torch

from lookahead_hf import fallback
from lookahead_hf.call import admission
from lookahead_hf.call.admission import Purpose
from lookahead_hf.config import SpeculativeConfig, check_int
from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting.budget import SIZES
from lookahead_hf.drafting.rates import memory_of, placement
from lookahead_hf.fallback import FallbackReason, Unserved
from lookahead_hf.model import compat
from lookahead_hf.ngram_pool import compilation
from lookahead_hf.rows import Rows
from lookahead_hf.runner.host import Runner, StepOptions, choose, groups_of
from lookahead_hf.runner.outputs import DeviceOutputs, Scores
from lookahead_hf.runner.patched import patched
from lookahead_hf.runner.prefill import start
from lookahead_hf.utils import unwrap
from lookahead_hf.verification import select

REPEATS = 5
"""Measurements of each size; one if an earlier process has measured it and time is limited."""

SECONDS = 10.0  # Most time that warming up takes, apart from completing a part that has begun


def warm_up(
    model: Any,
    *,
    batch_size: int = 1,
    context_length: int = 256,
    max_draft_nodes: int = 64,
    max_new_tokens: int = 256,
    do_sample: bool = False,
    compiled_layers: bool | str = True,
    seconds: float | None = SECONDS,
) -> None:
    """Compile, prepare layers, capture steps, and measure what draft tokens cost this model.

    It ends after `seconds`, and calls do the rest. For a model of 135 million parameters on two
    cores everything takes about 3 seconds, and 30 more right after an installation.

    Without it the first calls decode plainly until another process has compiled (half a minute,
    once per installation). The first steps of a model find out what they cost, and on a CPU which
    layers the kernels compute; on a GPU, steps are captured during a call.

    Args:
        model: The model that will generate.
        batch_size: Rows of the calls to come.
        context_length: Approximate tokens of their texts; costs are kept per power of two. Lengths
            beyond the model's positions are not tried.
        max_draft_nodes: Most draft tokens per row, as in the configuration.
        max_new_tokens: Most tokens that calls on a GPU write behind such a text. Captured steps
            serve all calls that need no more room.
        do_sample: Whether these calls sample or have logits processors: then only the forward is
            captured. Captured steps serve one of the two kinds.
        compiled_layers: As in the `SpeculativeConfig` of these calls.
        seconds: When to end; None for no limit. A part that has begun is completed.

    Raises:
        ValueError: A number is not an int above 0, `compiled_layers` is no value that a
            configuration takes, or `model` is no model or has no weights.
    """
    names = "batch_size", "context_length", "max_draft_nodes", "max_new_tokens"
    sizes = batch_size, context_length, max_draft_nodes, max_new_tokens
    for name, size in zip(names, sizes, strict=True):
        check_int(name, size, 1, 2**31)
    end = time.monotonic() + (math.inf if seconds is None else seconds)
    compiled = SpeculativeConfig(compiled_layers=compiled_layers).compiled_layers
    model = unwrap(model)
    is_empty = {each.device.type for each in model.parameters()} == {"meta"}
    if is_empty and not any(map(compat.is_offloaded, model.modules())):
        raise ValueError("the model is on the device 'meta', without weights: load them first")
    groups = groups_of(model) if compiled else [compilation.drafting]
    for each in groups:
        if not each.is_available():  # what has failed is tried again
            each.retry()
    compilation.wait(groups, end - time.monotonic())
    if time.monotonic() >= end:
        return
    try:
        admission.admit(model, Purpose.WARM_UP)
    except Unserved as unserved:
        if unserved.reason is FallbackReason.VERSION:
            fallback.report(model, unserved, "warn")
        return  # its calls will run plain generate
    if model.config.is_encoder_decoder:
        return  # its calls learn what its steps cost
    room = compat.most_positions(model)
    if room is not None:
        max_draft_nodes = min(max_draft_nodes, room // 2)
        context_length = max(1, min(context_length, room - 1 - max_draft_nodes))
        max_new_tokens = max(1, min(max_new_tokens, room - context_length))
    runner = _runner(model, batch_size, max_new_tokens, do_sample, compiled)
    try:
        most_nodes = min(max_draft_nodes, runner.most_nodes or max_draft_nodes)
        _measure(runner, context_length, most_nodes, end)
    finally:
        runner.end()


def _runner(
    model: Any, num_rows: int, max_new_tokens: int, do_sample: bool, compiled: bool | str
) -> Runner:
    def takes_packed(reads_prompts: bool) -> bool:
        return (num_rows > 1 or reads_prompts) and admission.model_takes_packed(model)

    options = StepOptions(
        model,
        num_rows,
        max_new_tokens,
        takes_packed,
        compiled_layers=compiled,
        scoring=_unaltered if do_sample else None,
    )
    return choose(select.engine_of(model.device), options)


def _unaltered(rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Scores:
    return Scores(logits.to(copy=True, dtype=torch.float32))


@torch.no_grad()
def _measure(runner: Runner, context_length: int, most_nodes: int, end: float) -> None:
    """Time steps of every size, in turns, so that a disturbance hits all sizes."""
    model, num_rows = runner.model, runner.num_rows
    vocab = int(compat.text_config(model).vocab_size)
    ids = np.random.default_rng(0).integers(0, vocab, (num_rows, context_length))
    rows = Rows(ids)
    with patched(model):
        prompt = torch.from_numpy(ids).to(model.device)
        start(runner, prompt)
        for row in range(num_rows):
            rows.emit(row, int(ids[row, 0]))
        runner.capture()
        # The first step finds out which layers the kernels compute.
        _time_step(runner, rows, ids[0, 0] % vocab, 0)
        setting = num_rows, context_length, placement(model), runner.mode, runner.sizes
        curve = memory_of(model).costs.curve(*setting, runner.is_packed)
        if runner.is_packed:  # nothing is kept of greater blocks
            most_nodes = max(0, min(most_nodes, curve.sizes[-1] // num_rows - 1))
        known = SIZES if runner.is_packed else curve.sizes
        counts = {min(size, most_nodes) for size in known}
        firsts: dict[int, float] = {}
        # Downwards, since a step after a much larger one takes longer.
        for turn, count in product(range(1 + REPEATS), sorted(counts, reverse=True)):
            if time.monotonic() >= end:
                break
            seconds = _time_step(runner, rows, ids[0, 0] % vocab, count)
            size = (1 + count) * num_rows if runner.is_packed else count
            if turn:
                curve.observe(size, seconds)
            else:  # the first of a shape allocates
                firsts[size] = seconds
        for size, seconds in firsts.items():
            if not curve.num_samples(size):
                curve.observe(size, seconds)


def _time_step(runner: Runner, rows: Rows, token: int, num_nodes: int) -> float:
    draft = DraftTree.from_chains([[[token] * num_nodes]] * rows.num_rows)
    start = time.perf_counter()
    step = runner.launch(rows, draft)
    if isinstance(step, DeviceOutputs):
        step.walk.take()
    else:
        step.logits[:, -1, -1].cpu()  # waits for the device
    return time.perf_counter() - start
