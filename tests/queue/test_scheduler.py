"""Prompts that enter in pieces, beside rows that decode."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
import torch

import lookahead_hf
from lookahead_hf.queue import scheduler
from lookahead_hf.queue.request import Group, request_state
from lookahead_hf.runner.host import Runner
from tests.helpers import models
from tests.helpers.requests import DRAFTED, alone, prompts, running, seeded, settings, speculated


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma3"])
def model(request: pytest.FixtureRequest) -> Any:
    return lookahead_hf.enable(models.tiny(request.param))


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The tokens of rows that decode, and those of prompts, in every packed block."""
    seen: list[tuple[int, int]] = []
    launch, beside = Runner.launch, Runner.launch_beside

    def counted(self: Any, rows: Any, draft: Any) -> Any:
        seen.append((int(rows.live.sum()) + draft.num_nodes, 0))
        return launch(self, rows, draft)

    def counted_beside(self: Any, rows: Any, draft: Any, chunks: Any) -> Any:
        seen.append((int(rows.live.sum()) + draft.num_nodes, sum(map(len, chunks.values()))))
        return beside(self, rows, draft, chunks)

    monkeypatch.setattr(Runner, "launch", counted)
    monkeypatch.setattr(Runner, "launch_beside", counted_beside)
    return seen


@pytest.mark.parametrize("most", [5, 24])
def test_no_step_has_more_tokens_than_it_may(
    model: Any, blocks: list[tuple[int, int]], most: int
) -> None:
    texts, config = prompts(9), settings(model, eos_token_id=[5, 40])
    batching = seeded(max_batch_tokens=most)
    found = model.generate_batch(texts, config, batching, speculative=DRAFTED, max_slots=3)
    assert [each.generated_tokens for each in found.values()] == [
        alone(model, text, config) for text in texts
    ]
    if most > 5:  # with 5 tokens for 3 rows, no row has a draft
        speculated(found.values())
    assert any(decoding and pieces for decoding, pieces in blocks)
    assert max(decoding + pieces for decoding, pieces in blocks) <= most
    assert sum(pieces for _, pieces in blocks) >= sum(len(t) for t in texts if len(t) > most)


def test_a_long_prompt_does_not_hold_up_the_others(
    blocks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lookahead_hf.enable(models.tiny("llama"))
    monkeypatch.setattr(scheduler, "CHUNK", 8)
    short, *_ = prompts(1, longest=4)
    texts, config = [short, (prompts(1, 3)[0] * 30)[:80]], settings(model, max_new_tokens=40)
    found = model.generate_batch(texts, config, speculative=DRAFTED, max_slots=2)
    assert [each.generated_tokens for each in found.values()] == [
        alone(model, text, config) for text in texts
    ]
    assert [pieces for decoding, pieces in blocks if pieces] == [8] * 10
    assert sum(decoding > 0 for decoding, pieces in blocks if pieces) > 5
    speculated(found.values())


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], "a non-empty list of token ids"),
        ("text", "a non-empty list of token ids"),
        ([[1, 2]], "a non-empty list of token ids"),
        ([None, 1], "TypeError"),
        ([*range(5, 25), 10_000], "index"),  # found by the embedding, in the third piece
    ],
)
def test_what_is_no_prompt_fails_alone(
    model: Any, prompt: Any, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "CHUNK", 8)
    texts, config = [*prompts(2), prompt], settings(model)
    found = list(model.generate_batch(texts, config, speculative=DRAFTED, max_slots=3).values())
    assert error in found[2].error
    for index in (0, 1):
        assert found[index].generated_tokens == alone(model, texts[index], config)


def test_a_prompt_that_makes_nan_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of one token is joined with a row beside it, and masks do not hold NaN back."""
    undrafted = lookahead_hf.SpeculativeConfig(budget=0)
    model = lookahead_hf.enable(models.tiny("llama"), default=undrafted)
    monkeypatch.setattr(scheduler, "CHUNK", 8)
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = float("nan")
    chosen, lengths, most_new = random.Random(3), (60, 60, 41), (100, 2, 30)
    texts = [[chosen.randrange(3, 70) for _ in range(length)] for length in lengths]
    texts[1][3] = 77
    given = [
        {"input_ids": text, "max_new_tokens": most}
        for text, most in zip(texts, most_new, strict=True)
    ]
    found = [*model.generate_batch(given, settings(model), max_slots=2).values()]
    for number in (0, 2):
        config = settings(model, max_new_tokens=most_new[number])
        assert found[number].generated_tokens == alone(model, texts[number], config)


def test_groups_wait_in_turn() -> None:
    queue = scheduler.Engine(cast(Any, None), max_slots=1, max_batch_tokens=None, seed=0)
    large, pair, taken = Group(), Group(), list[str]()

    def add(group: Group | None, *names: str) -> None:
        for name in names:
            queue.add(request_state([5], name), group=group)

    def take(count: int) -> None:
        taken.extend(cast(Any, queue.take()).state.request_id for _ in range(count))

    add(large, *"ABCDE")
    take(2)
    add(Group(), "x")
    add(pair, "y", "z")
    take(2)
    add(Group(), "v")  # those that come anew do not keep a text waiting for more than a round
    add(None, "1", "2")
    take(7)
    assert "".join(taken) == "ABxyCv1zD2E" and queue.take() is None


def test_a_new_request_waits_for_two_steps_and_its_prompt(
    blocks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lookahead_hf.enable(models.tiny("llama"), default=DRAFTED)
    monkeypatch.setattr(scheduler, "CHUNK", 8)
    (old, new), config = [(each * 30)[:20] for each in prompts(2)], settings(model)
    heard, asked, deliver = dict[str, int](), dict[str, int](), scheduler.Engine.deliver

    def noted(self: Any, job: Any, record: Any = None) -> None:
        heard.setdefault(job.state.request_id, len(blocks))
        if len(blocks) >= 6 and "new" not in asked:
            asked["new"] = len(blocks)
            manager.add_request(new, request_id="new", streaming=True)
        deliver(self, job, record)

    monkeypatch.setattr(scheduler.Engine, "deliver", noted)
    with running(model, config, max_slots=3) as manager:
        manager.add_request(old, request_id="old", streaming=True, max_new_tokens=100)
        while "new" not in heard:
            assert manager.get_result(timeout=60) is not None
    assert heard["new"] - asked["new"] <= 3 + 2  # pieces of its prompt, and two steps
    assert any(decoding and pieces for decoding, pieces in blocks)
