"""Costs of steps are kept on disk, and the next process starts from them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import lookahead_hf
from lookahead_hf.drafting import kept_costs
from lookahead_hf.drafting.control.cost_model import SIZES, CostModel, KeptCurve
from lookahead_hf.drafting.memory import memory_of, placement
from tests.helpers.models import tiny
from tests.helpers.tiny_chat import save_tiny_chat

file_of = kept_costs.file_of  # which tests elsewhere do without


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kept costs, which is not there at first."""
    monkeypatch.setattr(kept_costs, "file_of", file_of)
    monkeypatch.setattr(kept_costs, "cache_root", lambda: tmp_path / "kept")
    return tmp_path / "kept" / "costs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return save_tiny_chat(tmp_path / "model")


def loaded(folder: Path, **kwargs: Any) -> Any:
    """The model as another process would load it: nothing is known of the object."""
    return lookahead_hf.enable(AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval())


def curve_of(model: Any, length: int = 40) -> Any:
    return memory_of(model).costs.curve(1, length, placement(model), "")


def test_the_next_process_starts_from_what_was_measured(root: Path, folder: Path) -> None:
    first = loaded(folder)
    lookahead_hf.warm_up(first, context_length=40, compiled_layers=False)
    second = loaded(folder)
    sizes = np.array(SIZES)
    assert curve_of(second).is_kept and not curve_of(first).is_kept
    assert curve_of(second).seconds(sizes).tolist() == curve_of(first).seconds(sizes).tolist()
    assert curve_of(second).greatest_size == curve_of(first).greatest_size > 8
    assert curve_of(second).num_samples(8) == 0
    assert not curve_of(loaded(folder, dtype=torch.bfloat16)).is_kept
    first.config.num_hidden_layers = 1
    assert file_of(first) != file_of(second)


def test_warming_up_is_shorter_then(root: Path, folder: Path) -> None:
    counts = []
    for _ in range(2):
        model = loaded(folder)
        lookahead_hf.warm_up(model, context_length=40, compiled_layers=False)
        counts.append(curve_of(model).num_samples(4))
    assert counts == [5, 1]


def test_real_steps_are_kept_too_and_scale_the_curve(root: Path, folder: Path) -> None:
    model, ids = loaded(folder), torch.arange(2, 30)[None]
    config = lookahead_hf.SpeculativeConfig(drafters="ngram", budget=4, compiled_layers=False)
    model.generate(ids, max_new_tokens=40, do_sample=False, speculative=config)
    (file,) = root.iterdir()
    kept = CostModel(kept=kept_costs.read(file))
    assert kept.num_observed == 0
    curve = kept.curve(1, 60, placement(model), "")
    before = curve.seconds(np.array([0, 4]))
    curve.observe(4, 10 * before[1])
    assert curve.seconds(np.array([0, 4])) == pytest.approx(10 * before)


def test_calls_write_now_and_then(
    root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, clock = memory_of(loaded(folder)), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    written: list[int] = []
    monkeypatch.setattr(kept_costs, "write", lambda file, curves: written.append(len(curves)))
    curve = memory.costs.curve(1, 40, "cpu")
    for now, steps in [(100.0, 7), (100.0, 1), (130.0, 50), (161.0, 1), (300.0, 3), (300.0, 5)]:
        clock[0] = now
        for _ in range(steps):
            curve.observe(4, 1.0)
        memory.keep_costs()
    assert len(written) == 3  # after 8 steps, 61 seconds later, and after 8 more steps


def test_a_model_that_was_built_here_has_no_file(root: Path) -> None:
    assert file_of(tiny("llama")) is None
    lookahead_hf.warm_up(tiny("llama"), context_length=8, max_draft_nodes=1)
    assert not root.exists()


@pytest.mark.parametrize(
    "content", ["", "{", "5", "[[1, 2]]", '[[["", false, 1, "", 3, null], [1.0, 2.0], 4]]']
)
def test_a_damaged_file_is_as_none(content: str, root: Path, folder: Path) -> None:
    file = file_of(loaded(folder))
    assert file is not None
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert kept_costs.read(file) == []
    assert not curve_of(loaded(folder)).is_kept


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_seconds_that_are_none_are_refused(wrong: float) -> None:
    costs = CostModel()
    costs.curve(1, 40, "cpu").observe(4, 1.0)
    (kept,) = costs.kept()
    values = json.loads(json.dumps(kept))
    assert KeptCurve.from_json(values) == kept
    values[1][3] = wrong
    with pytest.raises(ValueError, match="no curve"):
        KeptCurve.from_json(values)


def test_a_folder_that_cannot_be_written_to_costs_nothing(root: Path, folder: Path) -> None:
    root.parent.mkdir()
    root.write_text("a file in the folder's place")
    model = loaded(folder)
    lookahead_hf.warm_up(model, context_length=8, max_draft_nodes=1)
    assert model.generate(torch.tensor([[5]]), max_new_tokens=4, speculative=True).shape == (1, 5)


def test_the_oldest_files_go(root: Path) -> None:
    for number in range(4):
        kept_costs.write(root / f"{number}.json", [], most_files=2)
        os.utime(root / f"{number}.json", (number, number))
    assert sorted(each.name for each in root.iterdir()) == ["2.json", "3.json"]


def test_nothing_is_left_of_a_file_that_could_not_be_written(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> None:
        raise OSError("no space left on device")

    file = root / "a.json"
    kept_costs.write(file, [])
    monkeypatch.setattr(os, "fsync", fail)
    kept_costs.write(file, [])
    assert [*root.iterdir()] == [file]
    assert kept_costs.read(file) == []
