"""The seed guarantee: noise in any order is the noise that plain draws."""

from __future__ import annotations

import random
from weakref import WeakValueDictionary

import pytest
import torch

from lookahead_hf.verification.noise import Noise, Replay, same_as_multinomial

SHAPES = [
    pytest.param(rows, vocab, id=f"B{rows}-V{vocab}")
    for rows in (1, 3)
    for vocab in (1, 17, 1009, 8193, 49152)
]


def plain_draws(probs: list[torch.Tensor]) -> list[list[int]]:
    """Tokens that plain sampling picks step by step from `[rows, vocab]` probabilities."""
    return [torch.multinomial(p, 1).squeeze(1).tolist() for p in probs]


def random_probs(steps: int, rows: int, vocab: int, top: int | None = None) -> list[torch.Tensor]:
    """Probabilities of some steps; all tokens but the `top` likeliest have none."""
    generator = torch.Generator().manual_seed(rows * vocab)
    logits = [3 * torch.randn(rows, vocab, generator=generator) for _ in range(steps)]
    if top is not None and top < vocab:
        logits = [x.masked_fill(x < x.topk(top).values[:, -1:], -torch.inf) for x in logits]
    return [x.softmax(-1) for x in logits]


@pytest.mark.parametrize("top", [None, 3, 40], ids=["all", "top3", "top40"])
@pytest.mark.parametrize(("rows", "vocab"), SHAPES)
def test_picks_are_those_of_multinomial_in_any_order(rows: int, vocab: int, top: int | None):
    steps = 6
    probs = random_probs(steps, rows, vocab, top)
    torch.manual_seed(3)
    expected = plain_draws(probs)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    asked = [(step, row) for step in range(steps) for row in range(rows)]
    random.Random(vocab).shuffle(asked)
    noise = Noise(rows, vocab, "cpu")
    for step, row in asked:
        assert noise.pick(probs[step][row], row, step) == expected[step][row]
    noise.finish(steps)
    assert torch.equal(torch.get_rng_state(), after)


def test_the_generator_stands_where_plain_leaves_it_after_fewer_or_more_steps_than_asked():
    for steps in (0, 1, 4, 9):
        torch.manual_seed(5)
        plain_draws(random_probs(steps, 2, 31))
        after = torch.get_rng_state()
        torch.manual_seed(5)
        noise = Noise(2, 31, "cpu")
        noise.block(3)
        noise.finish(steps)
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("max_bytes", [0, 1 << 20])
def test_blocks_stay_bounded_and_old_steps_can_still_be_asked(max_bytes: int):
    torch.manual_seed(1)
    expected = [torch.empty(2, 50).exponential_() for _ in range(60)]
    torch.manual_seed(1)
    order = [*range(60), 3, 4, 5, 40, 59, 0, 16, 17, 31, *range(59, -1, -1)]
    noise, kept = Noise(2, 50, "cpu", max_bytes=max_bytes), WeakValueDictionary[int, torch.Tensor]()
    for step in order:
        block = noise.block(step)
        kept[id(block)] = block
        assert torch.equal(block, expected[step])
        assert len(kept) <= max(2, max_bytes // 400) + 1  # and the latest one before it is let go


def test_while_a_call_is_open_nothing_else_sees_its_noise():
    torch.manual_seed(2)
    expected = torch.empty(1, 64).exponential_()
    torch.manual_seed(2)
    first, second = Noise(1, 64, "cpu"), Noise(1, 64, "cpu")
    others = [second.block(0), torch.empty(1, 64).exponential_()]
    assert torch.equal(first.block(0), expected)
    assert not any(torch.equal(other, expected) for other in others)
    assert not torch.equal(*others)


def test_whoever_moved_the_generator_meanwhile_keeps_what_they_set():
    torch.manual_seed(2)
    noise = Noise(1, 64, "cpu")
    torch.manual_seed(77)
    state = torch.get_rng_state()
    noise.finish(3)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_interrupt_at_the_end_leaves_the_generator_as_the_call_found_it(
    monkeypatch: pytest.MonkeyPatch,
):
    torch.manual_seed(4)
    state = torch.get_rng_state()
    noise = Noise(2, 64, "cpu")
    noise.block(5)
    monkeypatch.setattr(Replay, "back_to", lambda replay, step: {}[step])
    with pytest.raises(KeyError):
        noise.finish(3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("vocab", [10, 3000])
def test_probabilities_that_are_not_finite_raise_what_plain_raises(vocab: int):
    every = torch.full((1, vocab), torch.nan)
    one = torch.full((1, vocab), 0.1).index_fill(1, torch.tensor([4]), torch.inf)
    for probs in (every, one):
        with pytest.raises(RuntimeError) as plain:
            torch.multinomial(probs, 1)
        with pytest.raises(RuntimeError) as ours:
            Noise(1, vocab, "cpu").pick(probs[0], 0, 0)
        assert str(ours.value) == str(plain.value)


def test_the_device_is_tried_before_it_is_trusted():
    assert same_as_multinomial(torch.device("cpu"))
    assert not same_as_multinomial(torch.device("meta"))
