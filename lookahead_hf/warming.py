"""Compile, record and measure ahead of the first call, instead of during it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from lookahead_hf import compat, ngram_pool
from lookahead_hf.drafting.costs import SIZES
from lookahead_hf.drafting.session import cost_setting, memory_of
from lookahead_hf.fallback import Unserved
from lookahead_hf.hook import unwrap
from lookahead_hf.rows import Rows
from lookahead_hf.steps import DraftTree
from lookahead_hf.target import admission, attention, positions
from lookahead_hf.target.forward import Target
from lookahead_hf.target.recorded import Wanted

REPEATS = 5


def warm_up(
    model: Any, *, batch_size: int = 1, context_length: int = 256, max_draft_nodes: int = 64
) -> None:
    """Compile and record what is done once, and measure what draft tokens cost this model.

    Without it the first call decodes plainly until numba has compiled (seconds, once per
    installation), the first steps of a model find out what they cost, and steps on a CPU are
    recorded, their weights packed, only after a while.

    Args:
        model: The model that will generate.
        batch_size: Rows of the calls to come.
        context_length: Tokens of their texts, roughly: costs are told apart by powers of two. What
            a model has no positions for is not tried.
        max_draft_nodes: Most draft tokens per row, as in the configuration.

    Raises:
        ValueError: A number that is no int from 1 on, or no model in `model`.
    """
    for name, value in (
        ("batch_size", batch_size),
        ("context_length", context_length),
        ("max_draft_nodes", max_draft_nodes),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an int from 1 on, not {value!r}")
    model = unwrap(model)
    if ngram_pool.available():
        ngram_pool.compile_now()
    try:
        admission.check_setup(model)
        admission.check_model(model)
    except Unserved:
        return  # its calls will run plain generate
    if model.config.is_encoder_decoder:
        return  # what its steps cost is learned in its calls
    room = positions.room(model)
    most = max_draft_nodes if room is None else min(max_draft_nodes, room // 2)
    sizes = [n for n in SIZES if n <= most]
    if room is not None:
        context_length = max(1, min(context_length, room - 1 - sizes[-1]))
    _measure(model, batch_size, context_length, sizes)


@torch.no_grad()
def _measure(model: Any, num_rows: int, context_length: int, sizes: list[int]) -> None:
    """Time steps of every size, the sizes in turn, so that a disturbance hits all of them."""
    vocab = int(compat.text_config(model).vocab_size)
    ids = np.random.default_rng(0).integers(0, vocab, (num_rows, context_length))
    rows, target = Rows(ids), Target(model, num_rows, wanted=Wanted())
    with attention.laid_under(model):
        prompt = torch.from_numpy(ids).to(model.device)
        target.start(prompt, compat.DynamicCache(config=model.config))
        for row in range(num_rows):
            rows.emit(row, int(ids[row, 0]))
        target.record(rows, at_once=True)
        costs, setting = memory_of(model).costs, cost_setting(model)
        curve = costs.curve(num_rows, context_length, setting, target.mode)
        for turn in range(REPEATS + 1):
            for size in sizes:
                seconds = _time_step(target, rows, ids[0, 0] % vocab, size)
                if turn:  # the first of a shape allocates
                    curve.observe(size, seconds)


def _time_step(target: Target, rows: Rows, token: int, num_nodes: int) -> float:
    """Seconds of a step that verifies a chain of `num_nodes` in every row and keeps nothing."""
    draft = DraftTree.from_chains([[[token] * num_nodes]] * rows.num_rows)
    start = time.perf_counter()
    outputs = target.forward(target.layout(rows, draft))
    outputs.logits[:, -1, -1].cpu()  # waits for the device
    return time.perf_counter() - start
