"""`lookahead-hf compile`, and how commands wait for compiled functions."""

from __future__ import annotations

from typing import Any

import pytest

from lookahead_hf.ngram_pool import compilation
from lookahead_hf.tools.cli.loading import wait_for_functions
from lookahead_hf.tools.cli.screen import Screen
from tests.helpers.commands import Run
from tests.helpers.compiling import Elsewhere, nothing_compiled

pytest.importorskip("numba")


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process that compiles what drafting needs, and ends when somebody has waited for long."""
    with nothing_compiled(monkeypatch) as pending:
        pending.append(bool)
        child, polls = Elsewhere(), iter(range(4))
        monkeypatch.setattr(compilation.drafting, "child", child)
        monkeypatch.setattr(compilation.drafting, "is_on_disk", lambda: next(polls, None) is None)
        monkeypatch.setattr(compilation, "POLL_SECONDS", 0.0)
        yield child


def test_it_waits_in_silence_where_there_is_no_terminal(run: Run, child: Elsewhere) -> None:
    out, err = run("compile", "--dtype", "bfloat16")
    assert out == err == "" and compilation.drafting.is_loaded()


def test_it_says_as_json_what_was_compiled(run: Run) -> None:
    found = run("compile", "--json", "--dtype", "float32").result
    assert found["groups"] == ["float32", "common", "drafting"] and found["seconds"] < 60


def test_a_failure_ends_it(run: Run, child: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    child.status = "OSError: No space left on device"
    monkeypatch.setattr(compilation.drafting, "is_on_disk", lambda: False)
    with pytest.warns(RuntimeWarning):
        _, err = run("compile", code=1)
    assert "No space left on device" in err


def test_other_commands_show_what_they_wait_for(
    child: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[Any] = []
    own = Screen.task

    def task(self: Screen, *words: Any, **named: Any) -> Any:
        tasks.append((*words, named))
        return own(self, *words, **named)

    monkeypatch.setattr(Screen, "task", task)
    for _ in range(2):
        wait_for_functions(Screen(), [compilation.drafting])
    ((label, about, named),) = tasks  # the second time, everything is loaded
    assert "once per installation" in label and about > 0 and named == {"unit": "seconds"}
