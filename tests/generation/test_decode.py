"""The loop under scripted drafts: stops, streams and failures end as in plain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import lookahead_hf
from tests.helpers.compared import served
from tests.helpers.fakes import Recorder
from tests.helpers.models import VOCAB, prompt, tiny
from tests.helpers.scripted import continuations, empty, right, scripted, wrong

GREEDY = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}


@pytest.fixture
def model() -> Iterator[Any]:
    """An enabled tiny Llama."""
    model = tiny("llama")
    with lookahead_hf.enabled(model):
        yield model


def plain_text(model: Any, inputs: dict[str, Any], **kwargs: Any) -> list[list[int]]:
    output = model.generate(**inputs, **{**GREEDY, **kwargs})
    return continuations(output, inputs["input_ids"].shape[1])


def test_a_model_is_set_up_for_decoding_as_plain_sets_it_up(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the prompt and the last step; experts on accelerators are set up for every step."""
    happened: list[str] = []

    @contextmanager
    def set_up(self: Any) -> Iterator[None]:
        happened.append("set up")
        yield
        happened.append("as before")

    call = {"input_ids": prompt(), **GREEDY}
    truth = plain_text(model, {"input_ids": prompt()})
    monkeypatch.setattr(type(model), "_optimize_model_for_decode", set_up)
    model.register_forward_pre_hook(lambda *_: happened.append("forward"))
    for config, num_steps in ((False, 23), (scripted(truth, right(5)), 4)):
        happened.clear()
        assert continuations(model.generate(**call, speculative=config), 12) == truth
        assert happened == ["forward", "set up", *["forward"] * num_steps, "as before"]


@pytest.mark.parametrize(
    ("script", "num_steps"),  # for 23 tokens after the first
    [(right(5), 4), (wrong, 23), (empty, 23)],
    ids=["right", "wrong", "empty"],
)
def test_drafts_decide_how_many_steps_a_text_takes(model: Any, script: Any, num_steps: int) -> None:
    inputs = {"input_ids": prompt()}
    truth = plain_text(model, inputs)
    out = model.generate(**inputs, **GREEDY, speculative=scripted(truth, script))
    assert continuations(out, 12) == truth
    stats = served(model)
    assert (stats.num_steps, stats.num_moved) == (num_steps, 0)
    assert stats.tokens_per_step == pytest.approx(23 / num_steps)
    assert (stats.num_drafted > 0) == (script is not empty)


@pytest.mark.parametrize("pad", [-1, VOCAB])
def test_a_pad_that_the_model_cannot_read_raises_as_in_plain(model: Any, pad: int) -> None:
    inputs = {"input_ids": prompt(3)}
    truth = plain_text(model, inputs)
    end = next(token for at, token in enumerate(truth[0]) if at >= 6 and token not in truth[0][:at])
    call = {**inputs, **GREEDY, "eos_token_id": end, "pad_token_id": pad}
    for speculative in (False, scripted(truth, right(3))):
        with pytest.raises(IndexError, match="index out of range"):
            model.generate(**call, speculative=speculative)
    assert model.generate(**{**call, "eos_token_id": None}, speculative=True).shape == (3, 36)


def test_the_record_is_there_at_a_streams_end_and_stays_when_a_call_raises(model: Any) -> None:
    class Asks(Recorder):
        def end(self) -> None:
            assert served(model).num_emitted == 24
            raise ConnectionError("the client went away")

    inputs = {"input_ids": prompt()}
    config = scripted(plain_text(model, inputs), right(3))
    with pytest.raises(ConnectionError):
        model.generate(**inputs, **GREEDY, streamer=Asks(), speculative=config)
    before = served(model)
    with pytest.raises(ConnectionError):
        model.generate(**inputs, **GREEDY, streamer=Recorder(3), speculative=config)
    assert served(model) is before
