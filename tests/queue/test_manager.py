"""The manager of continuous batching: requests come, are cancelled, fail, and leave."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import random
import sys
import threading
import time
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

import lookahead_hf
from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.queue import manager as managers
from lookahead_hf.queue import scheduler
from tests.helpers import architectures, models, requests
from tests.helpers.requests import WAIT, alone, prompts, results, running, settings, speculated


def test_requests_stream_whole_steps(model: Any) -> None:
    config, (text,) = settings(model), prompts(1)
    with running(model, config) as manager:
        name = manager.add_request(text, streaming=True, record_timestamps=True)
        parts = list(manager.request_id_iter(name))
    *earlier, last = [output.generated_tokens for output in parts]
    assert last == alone(model, text, config)
    assert all(last[: len(part)] == part for part in earlier)
    assert len(parts) == 1 + parts[-1].speculative_stats.row_steps  # the first token, and steps
    assert len(parts[-1].timestamps) == len(last)
    speculated(parts[-1:])


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_what_ends_a_text_comes_in_any_form(model: Any, kind: Any) -> None:
    ends, text = [*range(3, 50)], prompts(1)[0]
    with running(model, settings(model, eos_token_id=kind(ends))) as manager:
        manager.add_request(text, request_id="run's")
        manager.add_request(text, request_id="own", eos_token_id=[9])
        manager.add_request(text, request_id="none", eos_token_id=-1)
        found = results(manager, 3)
    for name, own in {"run's": ends, "own": [9], "none": -1}.items():
        expected = alone(model, text, settings(model, eos_token_id=own))
        assert found[name].generated_tokens == expected
    speculated(found.values())


def test_what_cannot_be_copied_for_every_text_is_an_error(model: Any) -> None:
    config, (text,) = settings(model, do_sample=True, num_return_sequences=2), prompts(1)
    with running(model, config) as manager:
        with pytest.raises(TypeError, match="cannot pickle"):
            manager.add_request(text, stopping_criteria=[threading.Lock()])
        manager.add_request(text, request_id="whole")
        found = results(manager, 2)
    for index, name in enumerate(("whole__child#0", "whole")):
        assert found[name].generated_tokens == alone(model, text, config, index)
    speculated(found.values())


def test_stopping_in_the_middle_gives_up_what_is_left(model: Any) -> None:
    config = settings(model, do_sample=True, num_return_sequences=2)
    manager = model.init_continuous_batching(config, requests.seeded(), max_slots=2)
    manager.start()
    names = manager.add_requests(prompts(5), max_new_tokens=400)
    names += [f"{name}__child#0" for name in names]
    manager.stop(hard_stop=True)
    assert not manager.is_running()
    found = {output.request_id: output for output in manager}
    assert set(found) == set(names)
    assert all("stopped" in output.error for output in found.values())
    assert manager.add_request([5]) is None  # transformers warns of it
    manager.start()
    name = manager.add_request(prompts(1)[0], max_new_tokens=4)
    assert len(results(manager, 2)[name].generated_tokens) == 4
    manager.destroy()


def test_a_pause_keeps_what_is_in_progress(model: Any) -> None:
    config, (text,) = settings(model, max_new_tokens=200), prompts(1)
    with running(model, config) as manager:
        manager.add_request(text, streaming=True)
        manager.get_result(timeout=WAIT)
        with manager.pause():
            while manager.get_result(timeout=0) is not None:
                pass
            assert model.generate(torch.tensor([text]), max_new_tokens=4).shape[1] == len(text) + 4
            assert manager.get_result(timeout=0) is None
        while not (found := manager.get_result(timeout=WAIT)).is_finished():
            pass
    assert found.generated_tokens == alone(model, text, config)


def test_handlers_that_are_gone_hold_nobody_up(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def listen(manager: Any) -> None:
        for name in "abc":
            manager.register_result_handler(name, lambda output: None)

    manager = model.init_continuous_batching(settings(model), requests.seeded(), max_slots=1)
    asyncio.run(listen(manager))
    for name in "abc":
        manager.add_request(prompts(1)[0], request_id=name)
    manager.start()
    manager.stop()
    assert [record.args[0] for record in caplog.records if "nobody" in record.msg] == [*"abc"]
    assert not manager._handlers and manager.get_result() is None


def test_what_fails_in_one_request_fails_that_request(model: Any) -> None:
    """And a run that is stopped decodes what waits."""
    config, texts = settings(model), prompts(5)
    own = [{}, {"no_such_setting": 1}, requests.broken_after(0), {"num_return_sequences": 2}, {}]
    manager = model.init_continuous_batching(config, requests.seeded(), max_slots=3)
    manager.start()
    for name, text, each in zip("abcde", texts, own, strict=True):
        manager.add_request(text, request_id=name, **each)
    manager.stop()
    found = {output.request_id: output for output in manager}
    for name, text in (("a", texts[0]), ("e", texts[4])):
        assert found[name].generated_tokens == alone(model, text, config)
    speculated([found["a"], found["e"]])
    errors = ("no_such_setting", "a callback that fails", "the same for all requests of a run")
    for name, error in zip("bcd", errors, strict=True):
        assert error in found[name].error


@pytest.mark.parametrize("seed", range(3))
def test_arrivals_cancellations_and_failures_in_any_order(
    model: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chosen, texts = random.Random(seed), prompts(12, seed)
    monkeypatch.setattr(scheduler, "CHUNK", (1, 5, 256)[seed % 3])
    config = settings(model, do_sample=seed == 1)
    with running(model, config, max_slots=chosen.randint(1, 4)) as manager:
        found, cancelled = {}, set()
        failing = {str(index) for index in range(len(texts)) if chosen.random() < 0.2}
        for index, text in enumerate(texts):
            own = requests.broken_after(len(text) + 3) if str(index) in failing else {}
            manager.add_request(text, request_id=str(index), **own)
            if chosen.random() < 0.5 and (output := manager.get_result(timeout=0.02)):
                found[output.request_id] = output
            if chosen.random() < 0.3:
                cancelled.add(name := str(chosen.randint(0, index)))
                manager.cancel_request(name)
        while len(found.keys() | cancelled) < len(texts):
            output = manager.get_result(timeout=WAIT)
            found[output.request_id] = output
    assert {name for name, output in found.items() if output.error} == failing & found.keys()
    found = {name: output for name, output in found.items() if name not in failing}
    for name, output in found.items():
        expected = alone(model, texts[int(name)], config, int(name))
        assert output.generated_tokens == expected
    speculated(found.values())


def test_who_finds_no_room_waits_for_some_time(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, texts, small = settings(model), prompts(5), {"max_queue_size": 1}
    with running(model, config, max_slots=1, **small) as manager:
        names = manager.add_requests(texts)
        found = results(manager, len(texts))
    assert [found[name].generated_tokens for name in names] == [
        alone(model, text, config) for text in texts
    ]
    monkeypatch.setattr(managers, "ROOM_SECONDS", 0.001)
    manager = model.init_continuous_batching(config, requests.seeded(**small))
    manager.add_request(texts[0])
    with pytest.raises(queue.Full):
        manager.add_request(texts[1])


def test_what_waits_for_room_is_not_added_to_a_run_that_has_ended(model: Any) -> None:
    def add() -> None:
        with pytest.raises(queue.Full):
            manager.add_request([7], request_id="late")
        refused.append(True)

    def waits(input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        begun.set()
        assert ends.wait(WAIT)
        return torch.zeros(len(input_ids), dtype=torch.bool)

    refused: list[bool] = []
    begun, ends, adding = threading.Event(), threading.Event(), threading.Thread(target=add)
    with running(model, settings(model), max_slots=1, max_queue_size=1) as manager:
        manager.add_request([5], request_id="row", stopping_criteria=[waits])
        assert begun.wait(WAIT)
        manager.add_request([6], request_id="waits")
        adding.start()
        manager.stop(block=False, hard_stop=True)
        ends.set()
        adding.join(WAIT)
        assert {output.request_id for output in manager} == {"row", "waits"}
    assert refused


def test_requests_draft_from_each_other_if_they_may_learn(model: Any) -> None:
    texts = [prompts(1)[0]] * 6
    pools = {learn: NgramPool() for learn in (True, False)}
    for learn, pool in pools.items():
        own = {"drafters": ("pool",), "pool": pool, "learn": learn}
        config = lookahead_hf.SpeculativeConfig(**own, budget=6)
        found = model.generate_batch(texts, settings(model), speculative=config, max_slots=2)
        stats = [output.speculative_stats for output in found.values()]
        assert (sum(each.num_accepted for each in stats) > 0) is learn
        if learn:  # what ended first helps what began later
            assert stats[-1].num_steps < stats[0].num_steps


def test_what_cannot_be_served_goes_to_transformers(model: Any) -> None:
    config, own = settings(model), {"num_blocks": 2, "cpu_offload_space": 1.0}
    with pytest.warns(lookahead_hf.SpeculationFallbackWarning, match="cpu_offload_space"):
        manager = model.init_continuous_batching(config, requests.seeded(**own))
    assert type(manager) is ContinuousBatchingManager
    model.set_attn_implementation("sdpa")
    lookahead_hf.hook.state_of(model).warned.clear()
    with pytest.raises(lookahead_hf.SpeculationFallbackError, match="draft_invariant"):
        strict = lookahead_hf.SpeculativeConfig(draft_invariant=True, on_fallback="error")
        model.init_continuous_batching(config, speculative=strict)
    heads = lookahead_hf.SpeculativeConfig(drafters=("ngram", "mtp"))
    with pytest.raises(ValueError, match="'mtp' reads hidden states"):
        model.init_continuous_batching(config, speculative=heads)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted by their entries in /proc")
def test_who_starts_a_manager_leaves_the_cores_to_it(model: Any) -> None:
    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    def start() -> None:
        before = threads()
        torch.ones(10**6).exp()
        team = threads() - before
        with running(model, settings(model)):
            found.append((team, team & threads()))

    found: list[tuple[set[str], set[str]]] = []
    number, starter = torch.get_num_threads(), threading.Thread(target=start)
    torch.set_num_threads(2)
    starter.start()
    starter.join()
    torch.set_num_threads(number)
    ((team, left),) = found
    assert team and not left


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "deepseek_v32", "bloom"])
def test_models_that_keep_more_than_k_and_v_go_to_transformers(model_type: str) -> None:
    model = lookahead_hf.enable(architectures.build(model_type))
    strict = lookahead_hf.SpeculativeConfig(on_fallback="error")
    with pytest.raises(lookahead_hf.SpeculationFallbackError, match="batching|not supported"):
        model.init_continuous_batching(settings(model), speculative=strict)


def test_a_forward_that_fails_fails_everything_and_nobody_waits() -> None:
    model = lookahead_hf.enable(models.tiny("llama"), default=requests.DRAFTED)
    forwards = itertools.count()

    def fail(*args: Any) -> None:
        if next(forwards) >= 5:
            raise MemoryError("no room")

    model.register_forward_pre_hook(fail)
    with running(model, settings(model)) as manager:
        manager.add_requests(prompts(4))
        assert all("no room" in output.error for output in results(manager, 4).values())
        manager.stop()
    assert isinstance(manager.fatal_error, MemoryError)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [MemoryError("no room"), SystemExit(3), KeyboardInterrupt()])
def test_who_waits_hears_of_what_ends_the_thread(
    model: Any, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = model.init_continuous_batching(settings(model), requests.seeded())

    def fail() -> None:
        time.sleep(0.1)  # until the result is waited for
        raise error

    monkeypatch.setattr(manager, "_decode_all", fail)
    manager.start()
    with pytest.raises(RuntimeError, match="ended by an exception") as raised:
        manager.get_result()
    assert repr(error) in repr(raised.value.__cause__)
    manager.start()
    assert manager.add_request([5])  # though the first thread may not have ended yet
    manager.stop()


def test_who_waits_goes_on_when_another_thread_stops_the_run(model: Any) -> None:
    manager = model.init_continuous_batching(settings(model), requests.seeded())
    manager.start()
    threading.Timer(0.1, lambda: manager.stop(block=False)).start()
    assert manager.get_result() is None
