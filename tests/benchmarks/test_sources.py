"""The benchmark of optional sources runs them all beside what they would replace."""

from __future__ import annotations

import importlib
from types import ModuleType

import numpy as np
import pytest

from lookahead_hf.ngram_pool import NgramPool
from tests.helpers.drafts import rows_of


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = importlib.import_module("sources")
    monkeypatch.setattr(found, "SAMPLES", 2)
    monkeypatch.setattr(found, "python_sources", lambda tokenizer: NgramPool(1_000))
    return found


def test_every_case_has_its_table(
    benchmark: ModuleType, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", folder, "--assistant", folder, "--families", "qa", "--budget", "8"]
    words += ["--prompts-per-family", "1", "--new-tokens", "24"]
    benchmark.main([*words, *benchmark.CASES])
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "| all" in line]
    steps = {name: float(tokens_per_step) for _, name, _, _, tokens_per_step, *_ in lines}
    assert {"plain", "default", "transformers", "default + pool"} <= set(steps)
    assert all(steps[name] > 1.0 for name in steps if name.startswith("default"))
    assert steps["default + assistant"] > steps["default"]  # the model itself is always right


@pytest.mark.parametrize(
    ("text", "drafted"),
    [([1, 2], [3, 4]), ([5, 2], [9, 2]), ([7], []), ([4, 1], [2, 3]), ([3], [4, 5])],
)
def test_what_follows_the_longest_common_run(text: list[int], drafted: list[int]) -> None:
    runs = importlib.import_module("peers.common_run")
    rows = rows_of([[0, *text]], num_emitted=len(text))
    draft = runs.CommonRun([1, 2, 3, 4, 5, 2, 9, 2, 7]).propose(rows, 2)
    assert np.array_equal(draft.token_ids, drafted)
