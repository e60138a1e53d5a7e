"""The self test of a model with recurrent states: do ragged chains give plain logits?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lookahead_hf import compat
from lookahead_hf.draft import DraftTree
from lookahead_hf.model import numerics
from lookahead_hf.model_state import state_of
from lookahead_hf.patches.patched import patched
from lookahead_hf.rows import Rows
from lookahead_hf.runner.host import Runner
from lookahead_hf.support.plain_steps import plain_by_steps

PROMPT = 6
RIGHT = ((3, 0, 2, 0, 1, 3, 2, 3), (1, 2, 0, 3, 0, 2, 3, 3))
"""Right tokens in the chains of two rows, step by step, more than `MOST_PENDING` in all. From the
second step on a wrong token follows."""

TOLERANCE = 1e-3
"""Largest difference allowed, in standard deviations of the logits. Rounding gives about 1e-5, an
ignored state 2e-2 in a tiny Jamba."""

MIXER_TOLERANCE, MIXER_TOLERANCE_HALF = 1e-3, 0.1
"""Largest difference of a mixer's outputs and states that counts as rounding, in standard
deviations."""


@torch.no_grad()
def differs_by(model: Any) -> float:
    """Return the largest difference from plain logits, in their standard deviations.

    This also finds the mixers that have to get the tokens of a block one by one.
    """
    vocab = compat.text_config(model).vocab_size
    length = PROMPT + 2 + max(sum(each) + len(each) for each in RIGHT)
    text = np.random.default_rng(0).integers(vocab // 8, vocab, length)
    ids = torch.from_numpy(text)[None].to(model.device)
    expected = plain_by_steps(model, ids, torch.ones_like(ids), PROMPT)[0]
    worst = 0.0
    with patched(model):
        _decide(model, text)
        for at, logits in _ragged(Runner(model, 2), text):
            worst = np.maximum(worst, float((logits.float() - expected[at - PROMPT]).abs().max()))
    return float(worst) / float(expected.std())


def _decide(model: Any, text: np.ndarray) -> None:
    """Find and remember the mixers that do not go on from their state with several tokens."""
    known, key = state_of(model).stepwise_mixers, numerics.of_model(model)
    known.pop(key, None)
    runner = Runner(model, 2)
    _ragged(runner, text)
    limit = MIXER_TOLERANCE if key.is_exact else MIXER_TOLERANCE_HALF
    assert runner.recurrent is not None
    differences = enumerate(runner.recurrent.differences)
    known[key] = frozenset(i for i, found in differences if not found <= limit)


def _ragged(runner: Runner, text: np.ndarray) -> list[tuple[int, torch.Tensor]]:
    """Return logits of two rows that advance by different counts, each with its place."""
    prompt = torch.from_numpy(text[:PROMPT])[None].repeat(2, 1)
    rows, got = Rows(prompt.numpy()), []
    runner.start(prompt.to(runner.model.device), compat.DynamicCache(config=runner.model.config))
    for row in range(2):
        rows.emit(row, int(text[PROMPT]))
    for step, right in enumerate(zip(*RIGHT, strict=True)):
        ends = PROMPT + rows.num_emitted  # of the text so far, [rows]
        drafts = [text[end : end + n].tolist() for end, n in zip(ends, right, strict=True)]
        for row in range(2) if step else ():
            drafts[row].append((int(text[ends[row] + right[row]]) + 1) % int(text.max()))
        logits = runner.launch(rows, DraftTree.from_chains([[each] for each in drafts])).logits
        for row, (end, n) in enumerate(zip(ends.tolist(), right, strict=True)):
            got += [(end - 1 + place, logits[row, place]) for place in range(n + 1)]
            for token in text[end : end + n + 1].tolist():
                rows.emit(row, token)
        runner.keep(np.array(right) + 1)
    assert runner.recurrent is not None
    runner.recurrent.settle()
    last = runner.launch(rows, DraftTree.empty(2)).logits
    return got + [(PROMPT + int(n) - 1, last[row, 0]) for row, n in enumerate(rows.num_emitted)]
