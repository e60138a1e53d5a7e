"""Picked tokens are the likeliest; drawn ones follow the distribution that is handed over."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from lookahead_hf.sources.assistant.growth import TENTHS, Drawn, Likeliest

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


def begun(drawn: Drawn) -> Drawn:
    drawn.begin(torch.device("cpu"))
    return drawn


def test_a_larger_target_vocabulary_has_no_chance_beyond_the_assistants() -> None:
    _, _, drawn_from = begun(Drawn(2, VOCAB + 4, ())).pick(LOGITS, ROWS, PLACES)
    assert drawn_from is not None and drawn_from.shape == (3, 2, VOCAB + 4)
    assert drawn_from[..., VOCAB:].sum() == 0
    torch.testing.assert_close(drawn_from.sum(-1), torch.ones(3, 2))


def test_warpers_shape_what_is_drawn_from_and_nothing_else_does() -> None:
    processors = [
        hf.TemperatureLogitsWarper(0.5),
        hf.RepetitionPenaltyLogitsProcessor(1.5),
        hf.TopKLogitsWarper(3),
    ]
    tokens, classes, drawn_from = begun(Drawn(1, None, processors)).pick(LOGITS, ROWS, PLACES)
    scores = hf.TopKLogitsWarper(3)(None, LOGITS[ROWS, PLACES] / 0.5)
    assert drawn_from is not None
    torch.testing.assert_close(drawn_from[:, 0], scores.softmax(-1))
    assert (classes == TENTHS).all()
    assert (drawn_from[np.arange(3), 0, tokens[:, 0]] > 0).all()


def test_draws_follow_the_distribution_one_after_the_other() -> None:
    count = 4000
    logits = LOGITS[0, 0].expand(1, count, VOCAB)
    drawn = begun(Drawn(2, None, ()))
    tokens, _, drawn_from = drawn.pick(logits, np.zeros(count, np.int64), np.arange(count))
    probs = LOGITS[0, 0].softmax(-1).double()
    joint = probs[:, None] * probs[None] / (1 - probs[:, None])
    joint.fill_diagonal_(0.0)
    seen = np.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB**2)
    expected = count * joint.flatten().numpy()
    cells = expected > 0
    chi_square = float(((seen - expected)[cells] ** 2 / expected[cells]).sum())
    assert seen[~cells].sum() == 0
    assert chi_square < 73  # 41 degrees of freedom: exceeded once in 700 seeds
    assert drawn_from is not None
    second = probs.clone()
    second[tokens[0, 0]] = 0.0
    torch.testing.assert_close(drawn_from[0, 0], probs.float())
    torch.testing.assert_close(drawn_from[0, 1], (second / second.sum()).float())


@pytest.mark.parametrize("num_picks", [1, 3])
def test_every_place_gets_as_many_tokens_named_where_none_is_left(num_picks: int) -> None:
    processors = [hf.TopKLogitsWarper(1)]
    drawn = begun(Drawn(num_picks, None, processors))
    tokens, _, drawn_from = drawn.pick(LOGITS, ROWS, PLACES)
    assert tokens.shape == (3, num_picks)
    assert all(len(set(row)) == num_picks for row in tokens.tolist())
    assert (tokens[:, 0] == LOGITS[ROWS, PLACES].argmax(-1).numpy()).all()
    assert drawn_from is not None
    expected = torch.nn.functional.one_hot(torch.from_numpy(tokens).long(), VOCAB).float()
    assert torch.equal(drawn_from, expected)
