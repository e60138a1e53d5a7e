"""The benchmark of predictions makes the edits that it describes, and measures them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.tiny_chat import DRAFTING

PROGRAM = "prediction"
TEXT = """def total(numbers):
    result = 0
    for number in numbers:
        result += number
    return result


print(total([1, 2, 3]))
"""


@pytest.mark.parametrize("seed", range(8))
def test_edits_are_what_they_say(benchmark: ModuleType, seed: int) -> None:
    old = {kind: make(TEXT, random.Random(seed)) for kind, make in benchmark.KINDS.items()}
    new = TEXT.splitlines()
    renamed = old["rename"].replace("my_", "")
    assert renamed == TEXT and old["rename"].count("my_") > 1
    inserted = old["insert"].splitlines()
    assert 2 <= len(new) - len(inserted) <= 4 and set(inserted) <= set(new)
    deleted = old["delete"].splitlines()
    assert len(deleted) == len(new) + 2 and [line for line in new if line not in deleted] == []
    changed = old["change"].splitlines()
    assert sum(a != b for a, b in zip(new, changed, strict=True)) == 3


def test_the_table_has_all_kinds(
    benchmark: ModuleType,
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The tiny model writes neither lines nor names, so the old file is its text.
    monkeypatch.setattr(benchmark, "KINDS", {"same": lambda text, rng: text})
    monkeypatch.setattr(benchmark, "SPECULATIVE", DRAFTING)
    words = ["--model", folder, "--edits", "1", "--rounds", "1", "--new-tokens", "100"]
    benchmark.main([*words, "--json", str(tmp_path / "out.json")])
    lines = json.loads((tmp_path / "out.json").read_text())["lines"]
    systems = {line["system"]: line for line in lines if line["family"] == "all"}
    predicted = benchmark.PREDICTED, benchmark.COMMON_RUN
    assert set(systems) == {"plain", "speculative", *predicted}
    assert all(line["identical"] == 1.0 for line in lines)
    for name in predicted:
        assert systems[name]["tokens_per_step"] > systems["speculative"]["tokens_per_step"]
    benchmark.main([*words[:-1], "50"])
    assert "1 left out" in capsys.readouterr().err
