"""Every example runs from its file, without a network, and speculates."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from lookahead_hf.drafting.budget import SLOPE, CostCurve
from tests.helpers.compared import speculated
from tests.helpers.tiny_chat import save_looping_chat

EXAMPLES = sorted(Path(__file__).parents[1].glob("examples/[!_]*.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_looping_chat(tmp_path_factory.mktemp("model"))


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_speculates(
    example: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # On a tiny model no draft is worth its measured cost, so a node costs what is assumed first.
    observe = CostCurve.observe
    monkeypatch.setattr(CostCurve, "observe", lambda curve, n, _: observe(curve, n, 1 + SLOPE * n))
    monkeypatch.setattr(sys, "argv", [str(example), "--model", str(folder)])
    monkeypatch.syspath_prepend(str(example.parent))
    names = runpy.run_path(str(example), run_name="__main__")
    shown = capsys.readouterr().out
    assert "identical: True" in shown and "identical: False" not in shown
    speculated(names["model"])


def test_the_notebook_runs_and_speculates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads(Path(EXAMPLES[0].parent, "first_steps.ipynb").read_text("utf-8"))
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            code = "".join(cell["source"])
            exec(code.replace('"HuggingFaceTB/SmolLM2-135M-Instruct"', repr(str(folder))), names)
    assert "identical: True" in capsys.readouterr().out
    speculated(names["model"])
