"""Live text: whole characters, in order, accepted tokens marked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lookahead_hf.cli.live_text import LiveText, StepRecorder
from lookahead_hf.cli.screen import Screen
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.rows import Rows


class Bytes:
    """A tokenizer whose tokens are bytes of UTF-8."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def step(recorder: StepRecorder, rows: Rows, emitted: str, num_accepted: int) -> None:
    """Tell the recorder of one step of one row."""
    ids = np.frombuffer(emitted.encode(), np.uint8).astype(np.int64)
    verdict = Verdict(
        token_offsets=np.array([0, len(ids)]),
        token_ids=ids,
        path_offsets=np.array([0, num_accepted]),
        path=np.arange(num_accepted, dtype=np.int32),
        live=np.array([True]),
        finished=np.array([False]),
    )
    recorder.observe(rows, DraftTree.empty(1), verdict, torch.empty(0))


def feed(text: LiveText, tokens: str) -> None:
    for token in tokens.encode():
        text.put(torch.tensor([token]))


@pytest.fixture
def rows() -> Rows:
    return Rows(np.zeros((1, 2), np.int64))


def test_plain_text_is_shown_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    text = LiveText(Bytes(), Screen())
    text.put(torch.tensor([[1, 2]]))
    feed(text, "ab")
    assert capsys.readouterr().out == "ab"
    text.end()
    assert capsys.readouterr().out == "\n"


@pytest.mark.parametrize("observed_first", [True, False])
def test_accepted_tokens_are_marked(
    rows: Rows, observed_first: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = StepRecorder()
    text = LiveText(Bytes(), Screen(), recorder)
    recorder.begin(rows)
    text.put(torch.tensor([[1, 2]]))
    feed(text, "a")
    for emitted, num_accepted in [("bcd", 2), ("e", 0), ("fg", 2)]:
        if observed_first:
            step(recorder, rows, emitted, num_accepted)
        feed(text, emitted)
        if not observed_first:
            step(recorder, rows, emitted, num_accepted)
    shown = capsys.readouterr().out
    assert shown == "a‹bc›de‹fg"  # nothing waits for the next step
    text.end()
    assert shown + capsys.readouterr().out == "a‹bc›de‹fg›\n"


def test_a_character_is_shown_when_it_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    text = LiveText(Bytes(), Screen())
    text.put(torch.tensor([[1]]))
    text.put(torch.tensor([0xC3]))
    assert capsys.readouterr().out == ""
    text.put(torch.tensor([0xA9]))
    text.end()
    assert capsys.readouterr().out == "é\n"
