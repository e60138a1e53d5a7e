"""`lookahead-hf chat`: turns on one cache, as text and as JSON lines."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from lookahead_hf.cli.chat import Conversation
from lookahead_hf.cli.comparison import Stage
from lookahead_hf.cli.screen import JsonScreen
from tests.helpers.commands import Run
from tests.helpers.tiny_chat import stage_on

TURNS = ("abc abc abc", "abcd", "once more: abc abc abc")


@pytest.fixture(scope="module")
def stage(folder: str) -> Stage:
    return stage_on(folder, 24, JsonScreen())


@pytest.fixture
def fed(stage: Stage) -> Iterator[list[int]]:
    """Collects how many tokens each forward is fed."""
    widths: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        widths.append(kwargs["input_ids"].shape[1])

    handle = stage.model.register_forward_pre_hook(note, with_kwargs=True)
    yield widths
    handle.remove()


def test_each_turn_computes_what_is_new_and_says_what_a_fresh_start_says(
    stage: Stage, fed: list[int]
) -> None:
    conversation, messages = Conversation(stage), []
    before: list[int] = []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        inputs = stage.encode(messages)
        expected = stage.model.generate(**inputs, **stage.generation, speculative=False)
        prompt = inputs["input_ids"][0].tolist()
        fed.clear()
        call, known = conversation.answer(turn)
        assert [*prompt, *call.rows[0]] == expected[0].tolist()
        assert fed[0] == len(prompt) - known
        # The end token that the template puts after an answer was not in the cache.
        text = stage.tokenizer.decode(call.rows[0], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text})
        same = [a == b for a, b in zip(before, prompt, strict=False)]
        assert known == min((*(i for i, each in enumerate(same) if not each), len(same)))
        before = [*prompt, *call.rows[0][:-1]]
    assert known > 40
    assert call.stats is not None and call.stats.num_accepted > 0


def test_a_cache_that_cannot_be_shortened_is_made_anew(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = Conversation(stage)
    conversation.answer(TURNS[0])
    conversation._cached[5] = -1  # as if the template had changed what it wrote
    assert conversation.answer(TURNS[1])[1] == 5
    conversation._cached[5] = -1
    moved = Mock(side_effect=RuntimeError("a window has moved on"))
    monkeypatch.setattr(conversation._cache, "crop", moved)
    assert conversation.answer(TURNS[2])[1] == 0


@pytest.mark.parametrize("plain", [[], ["--plain"]])
def test_json_has_a_line_per_turn(
    plain: list[str], folder: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\nabc\n  \nabcd\n\n"))
    shown = run("chat", "--model", folder, "--new-tokens", "16", "--json", *plain)
    first, second = map(json.loads, shown.out.splitlines())
    assert (first["prompt"], first["cached_tokens"]) == ("abc", 0)
    assert second["cached_tokens"] > 4
    if plain:
        assert second["stats"] is None
    else:
        assert second["stats"]["fallback_reason"] is None


def test_on_a_terminal_an_empty_line_ends(
    folder: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\nabc\n"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    shown = run("chat", "--model", folder)
    assert shown.out == "" and "An empty line or Ctrl-D ends.\n" in shown.err
