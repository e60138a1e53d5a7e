"""The generating commands on a tiny model, from the command line to the table."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch

from lookahead_hf import SpeculativeConfig
from lookahead_hf.cli import comparison, main
from lookahead_hf.cli.comparison import Stage, Timed, explain_parting, first_difference
from lookahead_hf.cli.loading import encode_chat
from lookahead_hf.cli.screen import Screen
from tests.helpers.tiny_chat import DRAFTING, stage_on


@pytest.fixture(scope="module")
def stage(folder: str) -> Stage:
    return stage_on(folder, 12, Screen())


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_demo_shows_identical_texts_and_what_was_drafted(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["demo", "--model", folder, "--dtypes", "float32", "--new-tokens", "80"]
    assert main([*words, "--prompt", "abc abc abc"]) == 0
    shown = capsys.readouterr().out
    assert "identical: all 80 tokens" in shown
    assert "‹" in shown and "›" in shown
    steps = float(shown.splitlines()[-2].split()[-2])
    assert steps > 1.0


def test_demo_and_generate_as_json(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "SpeculativeConfig", partial(SpeculativeConfig, **DRAFTING))
    common = ["--model", folder, "--new-tokens", "24", "--json"]
    assert main(["demo", *common, "--dtypes", "float32", "--prompt", "abc abc"]) == 0
    (outcome,) = json.loads(capsys.readouterr().out)
    assert outcome["dtype"] == "float32" and outcome["num_same"] is None
    assert main(["generate", *common, "abc abc"]) == 0
    speculative = json.loads(capsys.readouterr().out)
    assert main(["generate", *common, "--plain", "abc abc"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert speculative["text"] == plain["text"] and plain["num_tokens"] == 24
    assert speculative["stats"]["num_accepted"] > 0 and plain["stats"] is None


def test_generate_prints_the_statistics(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--model", folder, "--new-tokens", "40", "--sample", "0.5,0.9"]
    assert main([*words, "--stats", "abc abc"]) == 0
    assert "tokens per step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("left", "right", "index"),
    [((1, 2, 3), (1, 2, 3), None), ((1, 2, 3), (1, 4, 3), 1), ((1, 2), (1, 2, 3), 2)],
)
def test_first_difference(left: Any, right: Any, index: int | None) -> None:
    assert first_difference(left, right) == index


def test_a_parting_shows_the_logits_of_plain(stage: Stage) -> None:
    inputs = encode_chat(stage.model, stage.tokenizer, said("abc abc"))
    output = stage.model.generate(
        **inputs, **stage.generation, return_dict_in_generate=True, output_logits=True
    )
    plain = tuple(output.sequences[0, inputs["input_ids"].shape[1] :].tolist())
    best, second = output.logits[7][0].topk(2).indices.tolist()
    assert plain[7] == best
    other = (*plain[:7], second, *plain[8:])
    found = explain_parting(stage, inputs, Timed(plain, 1.0), Timed(other, 1.0), 7)
    expected = output.logits[7][0][best] - output.logits[7][0][second]
    assert found.gap == pytest.approx(expected.item(), abs=1e-5)
    assert found.block_shift == pytest.approx(0.0, abs=1e-4)
    assert found.plain == repr(stage.tokenizer.decode([best]))
    spacing = torch.nextafter(output.logits[7][0][best], torch.tensor(torch.inf))
    assert found.spacing == pytest.approx((spacing - output.logits[7][0][best]).abs().item())
