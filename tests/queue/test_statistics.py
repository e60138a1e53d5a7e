"""Statistics of every request, which add up to those of the run."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest

import lookahead_hf
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.generation.recorder import StatsRecorder
from lookahead_hf.queue import scheduler
from lookahead_hf.queue import session as queue_session
from lookahead_hf.stats import joined
from lookahead_hf.trace import PARTS
from tests.helpers import models
from tests.helpers.requests import DRAFTED, WAIT, prompts, running, seeded, settings, speculated


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The sessions of the runs."""
    made: list[Any] = []
    new_session = queue_session.new_session

    def kept(*given: Any) -> Any:
        made.append(new_session(*given))
        return made[-1]

    monkeypatch.setattr(queue_session, "new_session", kept)
    monkeypatch.setattr(scheduler, "CHUNK", 8)
    return made


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> StatsRecorder:
    """Counts the steps of three rows, whichever requests have them."""
    whole, observe = StatsRecorder(3), StatsRecorder.observe

    def observed(self: StatsRecorder, draft: DraftTree, verdict: Verdict) -> None:
        observe(self, draft, verdict)
        observe(whole, draft, verdict)

    monkeypatch.setattr(StatsRecorder, "observe", observed)
    return whole


@pytest.mark.parametrize("attn", ["sdpa", "eager"], ids=["packed", "padded"])
@pytest.mark.parametrize("num_new", [1, 24])
def test_requests_add_up_to_the_run(
    sessions: list[Any], every_step: StatsRecorder, attn: str, num_new: int
) -> None:
    model = lookahead_hf.enable(models.tiny("llama", attn=attn), default=DRAFTED)
    config = settings(model, do_sample=True, num_return_sequences=2, max_new_tokens=num_new)
    texts = prompts(6)
    found = model.generate_batch(texts, config, seeded(), max_slots=3).values()
    stats = [output.speculative_stats for output in found]
    (session,) = sessions
    total, run = reduce(joined, stats), every_step.finish(session.rows)
    assert session.runner.is_packed is (attn == "sdpa")
    times = sum(getattr(total, f"{name}_ms") for name in PARTS)
    assert times == pytest.approx(sum(session.stats.milliseconds.values()))
    for name in ("num_moved", "num_accepted", "accepted_histogram"):
        assert getattr(total, name) == getattr(run, name)
    assert total.num_emitted == sum(len(output.generated_tokens) for output in found)
    assert total.num_steps == total.row_steps == sum(total.budget_histogram.values())
    assert total.num_accepted == sum(k * n for k, n in enumerate(total.accepted_histogram))
    alone = sum(each.num_fed for each in stats if not each.num_steps)
    if num_new == 1:  # every prompt is read once, and nothing else
        assert (alone, session.runner.num_fed) == (sum(map(len, texts)), 0)
    else:
        speculated(found)
        assert total.num_moved > 0
        read_alone = total.num_fed - session.runner.num_fed
        assert 0 < read_alone <= sum(map(len, texts))
        assert session.runner.num_fed == session.runner.step_tokens.sum()


def test_the_latest_statistics_are_those_of_the_whole_run() -> None:
    model = lookahead_hf.enable(models.tiny("llama"), default=DRAFTED)
    for count in (4, 3):
        found = model.generate_batch(prompts(count), settings(model), max_slots=2).values()
        total, run = reduce(joined, speculated(found)), lookahead_hf.last_stats(model)
        assert run is not None
        assert (run.rows, run.num_emitted) == (count, 24 * count)
        for name in ("num_steps", "num_accepted", "per_source", "accepted_histogram"):
            assert getattr(run, name) == getattr(total, name)
        assert {*run.row_stats} == {*total.row_stats}
    with running(model, settings(model)) as manager:
        manager.add_requests(prompts(2))
        *_, last = [manager.get_result(timeout=WAIT) for _ in range(2)]
    assert lookahead_hf.last_stats(model) == last.speculative_stats
