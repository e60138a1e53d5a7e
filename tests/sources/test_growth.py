"""Picked tokens are the likeliest; drawn ones follow the distribution that is handed over."""

from __future__ import annotations

import numpy as np
import torch
from transformers.generation import logits_process as hf

from lookahead_hf.sources.growth import TENTHS, Drawn, Likeliest

VOCAB = 7
LOGITS = torch.randn(3, 5, VOCAB, generator=torch.Generator().manual_seed(3))
ROWS, PLACES = np.array([0, 0, 2]), np.array([1, 4, 0])


def test_the_likeliest_come_with_their_tenth_of_probability() -> None:
    tokens, classes, drawn_from = Likeliest(2, None).pick(LOGITS, ROWS, PLACES)
    probs = LOGITS[ROWS, PLACES].softmax(-1)
    assert drawn_from is None
    assert tokens.tolist() == probs.topk(2).indices.tolist()
    assert classes.tolist() == (probs.topk(2).values * TENTHS).int().tolist()
    certain = torch.full((1, 1, VOCAB), -50.0).index_fill_(2, torch.tensor(4), 50.0)
    tokens, classes, _ = Likeliest(1, None).pick(certain, np.array([0]), np.array([0]))
    assert tokens.tolist() == [[4]] and classes.tolist() == [[TENTHS - 1]]


def test_a_larger_target_vocabulary_has_no_chance_beyond_the_assistants() -> None:
    _, _, drawn_from = Drawn(VOCAB + 4, ()).pick(LOGITS, ROWS, PLACES)
    assert drawn_from is not None and drawn_from.shape == (3, VOCAB + 4)
    assert drawn_from[:, VOCAB:].sum() == 0
    torch.testing.assert_close(drawn_from.sum(-1), torch.ones(3))


def test_warpers_shape_what_is_drawn_from_and_nothing_else_does() -> None:
    processors = [
        hf.TemperatureLogitsWarper(0.5),
        hf.RepetitionPenaltyLogitsProcessor(1.5),
        hf.TopKLogitsWarper(3),
    ]
    tokens, classes, drawn_from = Drawn(None, processors).pick(LOGITS, ROWS, PLACES)
    scores = hf.TopKLogitsWarper(3)(None, LOGITS[ROWS, PLACES] / 0.5)
    assert drawn_from is not None
    torch.testing.assert_close(drawn_from, scores.softmax(-1))
    assert (classes == TENTHS).all()
    assert (drawn_from[np.arange(3), tokens[:, 0]] > 0).all()


def test_draws_follow_the_distribution_and_begin_with_the_default_generator() -> None:
    count = 4000
    logits = LOGITS[0, 0].expand(1, count, VOCAB)
    draws = []
    for _ in range(2):
        torch.manual_seed(1)
        picked = Drawn(None, ()).pick(logits, np.zeros(count, np.int64), np.arange(count))
        draws.append(picked[0][:, 0])
    seen = np.bincount(draws[0], minlength=VOCAB)
    expected = count * LOGITS[0, 0].softmax(-1).double().numpy()
    assert ((seen - expected) ** 2 / expected).sum() < 22.5  # one seed in a thousand
    assert (draws[0] == draws[1]).all()
