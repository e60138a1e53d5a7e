"""Live text: whole characters, in order, accepted tokens marked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.drafter import Step
from lookahead_hf.rows import Rows
from lookahead_hf.tools.cli.comparison import ACCEPTED_STYLE, LiveText, StepRecorder
from lookahead_hf.tools.cli.screen import Screen
from tests.helpers.tiny_chat import byte_tokenizer

TOKENIZER = byte_tokenizer()


class Shown(Screen):
    """Keeps what is written, accepted text in capitals."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str, style: str = "") -> None:
        self.text += text.upper() if style == ACCEPTED_STYLE else text


def step(recorder: StepRecorder, emitted: str, num_accepted: int) -> None:
    """Tell the recorder of one step of one row."""
    verdict = Verdict(
        token_offsets=np.array([0, len(emitted)]),
        token_ids=np.zeros(len(emitted), np.int64),
        path_offsets=np.array([0, num_accepted]),
        path=np.arange(num_accepted, dtype=np.int32),
        live=np.array([True]),
        finished=np.array([False]),
    )
    rows = Rows(np.zeros((1, 2), np.int64))
    recorder.observe(Step(rows, DraftTree.empty(1), verdict, torch.empty(0)))


def broken(*_: object) -> None:
    raise BrokenPipeError


def feed(text: LiveText, tokens: str) -> None:
    for token in TOKENIZER(tokens)["input_ids"]:
        text.put(torch.tensor([token]))


def test_a_screen_that_is_gone_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, screen = StepRecorder(), Shown()
    text = LiveText(TOKENIZER, screen, recorder)
    text.put(torch.tensor([[1, 2]]))
    feed(text, "a")
    monkeypatch.setattr(screen, "write", broken)
    step(recorder, "a", 0)
    with pytest.raises(BrokenPipeError):
        feed(text, "b")


def test_accepted_tokens_are_marked_and_nothing_waits_for_the_next_step() -> None:
    recorder, screen = StepRecorder(), Shown()
    text = LiveText(TOKENIZER, screen, recorder)
    text.put(torch.tensor([[1, 2]]))
    feed(text, "a")
    recorder.begin(Rows(np.zeros((1, 2), np.int64)))
    assert screen.text == "a"
    for emitted, num_accepted, shown in [("bcd", 2, "aBCd"), ("e", 0, "aBCde"), ("fg", 2, "FG")]:
        feed(text, emitted)
        step(recorder, emitted, num_accepted)
        assert screen.text.endswith(shown)
    text.end()
    assert screen.text == "aBCdeFG\n"


@pytest.mark.parametrize(
    ("tokenizer", "before_the_end"),
    [
        (TOKENIZER, "a\té"),
        (SimpleNamespace(decode=TOKENIZER.decode), ""),
        (SimpleNamespace(decode=TOKENIZER.decode, backend_tokenizer="broken"), ""),
    ],
    ids=["whole characters", "slow", "failing"],
)
def test_half_a_character_waits_and_the_end_shows_all(tokenizer: Any, before_the_end: str) -> None:
    screen = Shown()
    text = LiveText(tokenizer, screen)
    text.put(torch.tensor([[1]]))
    feed(text, "a\té")
    half, _ = TOKENIZER("é")["input_ids"]
    text.put(torch.tensor([half]))
    assert screen.text == before_the_end
    text.end()
    assert screen.text == "a\té\ufffd\n"
