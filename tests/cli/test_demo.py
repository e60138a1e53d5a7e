"""The generating commands on a tiny model, from the command line to the table."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from lookahead_hf import SpeculativeConfig
from lookahead_hf.cli import comparison, demo, main
from lookahead_hf.cli.comparison import Timed, run_speculative
from tests.helpers.tiny_chat import DRAFTING


def test_demo_shows_identical_texts_and_what_was_drafted(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["demo", "--model", folder, "--dtypes", "float32", "--new-tokens", "80"]
    assert main([*words, "--prompt", "abc abc abc"]) == 0
    shown = capsys.readouterr().out
    assert "identical: all 80 tokens" in shown
    assert "‹" in shown and "›" in shown
    assert "float32: identical, 1 of 1" in shown
    steps = float(shown.splitlines()[-3].split()[-2])
    assert steps > 1.0


def test_demo_and_generate_as_json(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "SpeculativeConfig", partial(SpeculativeConfig, **DRAFTING))
    common = ["--model", folder, "--new-tokens", "24", "--json"]
    assert main(["demo", *common, "--dtypes", "float32", "--prompt", "abc abc"]) == 0
    (outcome,) = json.loads(capsys.readouterr().out)
    assert outcome["dtype"] == "float32" and outcome["parting"] is None
    assert main(["generate", *common, "abc abc"]) == 0
    speculative = json.loads(capsys.readouterr().out)
    assert main(["generate", *common, "--plain", "abc abc"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert speculative["text"] == plain["text"] and plain["num_tokens"] == 24
    assert speculative["stats"]["num_accepted"] > 0 and plain["stats"] is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_demo_fails_where_texts_part_without_a_near_tie(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    def changed(*arguments: Any) -> Timed:
        timed = run_speculative(*arguments)
        return replace(timed, ids=(*timed.ids[:5], (timed.ids[5] + 1) % 100, *timed.ids[6:]))

    monkeypatch.setattr(demo, "run_speculative", changed)
    words = ["demo", "--model", folder, "--dtype", dtype, "--new-tokens", "8", "--prompt", "abc"]
    assert main(words) == 1
    shown = capsys.readouterr()
    assert "The texts part after 5 identical tokens" in shown.out
    assert "BUG: parts beyond near ties, 1 of 1" in shown.out and "report this bug" in shown.err
