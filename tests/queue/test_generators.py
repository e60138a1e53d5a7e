"""Texts that draw from the default generators at one time, and do not wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributions import Gumbel
from transformers import LogitsProcessor

import lookahead_hf
from lookahead_hf.verification.rng import OwnGenerators
from tests.helpers import users_parts
from tests.helpers.models import prompt
from tests.helpers.requests import DRAFTED, WAIT, alone, prompts, running, settings, speculated

CPU = torch.device("cpu")

DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(5),
    "randn": lambda: torch.randn(5, dtype=torch.float64),
    "randint": lambda: torch.randint(3, 90, (5,)),
    "randint from 0": lambda: torch.randint(90, (5,)),
    "randperm": lambda: torch.randperm(9),
    "like": lambda: torch.cat([torch.rand_like(torch.ones(4)), torch.randn_like(torch.ones(4))]),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 4),
    "in place": lambda: torch.empty(5).exponential_() + torch.empty(5).uniform_(),
    "bernoulli": lambda: torch.bernoulli(torch.full((20,), 0.5)),
    "normal": lambda: torch.normal(torch.zeros(5), torch.ones(5)),
    "gumbel": lambda: torch.nn.functional.gumbel_softmax(torch.ones(5)),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(30)),
    "distribution": lambda: Gumbel(torch.zeros(3), torch.ones(3)).sample(),
}


@pytest.fixture
def taken() -> Iterator[Callable[[], None]]:
    """Until this is called, the default generators are those of another thread's text."""
    begun, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        with OwnGenerators(CPU, 1).in_place():
            begun.set()
            goes_on.wait(WAIT)

    thread = threading.Thread(target=hold)
    thread.start()
    assert begun.wait(WAIT)

    def free() -> None:
        goes_on.set()
        thread.join(WAIT)

    yield free
    free()


@pytest.mark.parametrize("name", DRAWS)
def test_a_text_draws_its_own_numbers_beside_another(taken: Any, name: str) -> None:
    own, before = OwnGenerators(CPU, 7), torch.get_rng_state()
    found = []
    for _ in range(2):
        with own.in_place():
            found += [DRAWS[name](), DRAWS[name]()]
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng([]):
        torch.manual_seed(7)
        for each in found:
            assert torch.equal(each, DRAWS[name]())


def test_a_text_goes_on_where_it_was_when_the_generators_are_free() -> None:
    own, other = OwnGenerators(CPU, 7), OwnGenerators(CPU, 8)
    with own.in_place():
        found = [torch.rand(3)]
    thread = threading.Thread(target=lambda: found.append(_drawn(own)))
    with other.in_place():
        thread.start()
        thread.join()
    with own.in_place():
        found.append(torch.rand(3))
    torch.manual_seed(7)
    assert all(torch.equal(each, torch.rand(3)) for each in found)


def _drawn(own: OwnGenerators) -> torch.Tensor:
    with own.in_place():
        return torch.rand(3)


@pytest.mark.parametrize("is_free", [False, True])
def test_a_text_within_a_text_has_numbers_of_its_own(
    taken: Callable[[], None], is_free: bool
) -> None:
    outer, inner = OwnGenerators(CPU, 7), OwnGenerators(CPU, 8)
    with outer.in_place():
        first = torch.rand(3)
        if is_free:
            taken()
        with inner.in_place():
            within = torch.rand(3)
        second = torch.rand(3)
    with torch.random.fork_rng([]):
        torch.manual_seed(8)
        assert torch.equal(within, torch.rand(3))
        torch.manual_seed(7)
        assert torch.equal(first, torch.rand(3)) and torch.equal(second, torch.rand(3))


def test_a_call_within_a_text_samples_as_plain_does(taken: Any, model: Any) -> None:
    call = {"max_new_tokens": 20, "do_sample": True, "pad_token_id": 0}
    ids = prompt(1, 9)
    with OwnGenerators(CPU, 7).in_place():
        ours = [model.generate(ids, **call, speculative=DRAFTED) for _ in range(2)]
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None and stats.num_accepted > 0
    with torch.random.fork_rng([]):
        torch.manual_seed(7)
        for each in ours:
            assert torch.equal(each, model.generate(ids, **call, speculative=False))


class AsksJudge(LogitsProcessor):
    """Lets another manager write a text, and waits for it."""

    def __init__(self, judge: Any, **own: Any) -> None:
        self.judge, self.own = judge, own

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.judge.add_request([5, 6, 7], max_new_tokens=4, **self.own)
        answer = self.judge.get_result(timeout=WAIT)
        assert answer is not None and answer.is_finished()
        return scores.index_fill(1, torch.tensor(answer.generated_tokens), 4.0)

    def __deepcopy__(self, memo: Any) -> AsksJudge:
        return self


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("own", [{}, {"logits_processor": [users_parts.Unknown()]}])
def test_a_processor_waits_for_another_manager(model: Any, own: Any, do_sample: bool) -> None:
    config, (text,) = settings(model, max_new_tokens=12, do_sample=do_sample), prompts(1)
    with running(model, settings(model)) as judge:
        given = {"logits_processor": [AsksJudge(judge, **own)]}
        with running(model, config) as manager:
            manager.add_request(text, **given)
            found = manager.get_result(timeout=WAIT)
        expected = alone(model, text, config, **given)
    assert found.generated_tokens == expected
    speculated([found])
