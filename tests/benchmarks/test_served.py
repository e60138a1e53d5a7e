"""The benchmarks of predictions and of several clients ask a server."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from lookahead_hf import SpeculativeConfig
from tests.helpers.served import save_ascii_chat, serving
from tests.helpers.tiny_chat import DRAFTING

for name in ("fastapi", "uvicorn", "openai", "prometheus_client"):
    pytest.importorskip(name)


def test_a_prediction_saves_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = importlib.import_module("served_prediction")
    # The tiny model writes neither lines nor names, so the old file is its text.
    monkeypatch.setattr(benchmark, "KINDS", {"same": lambda text, rng: text})
    folder = save_ascii_chat(tmp_path)
    with serving(folder, SpeculativeConfig(**DRAFTING)) as served:
        words = [folder, "--url", f"http://localhost:{served.port}/v1", "--edits", "1"]
        benchmark.main([*words, "--new-tokens", "100"])
        *_, row = capsys.readouterr().out.splitlines()
        benchmark.main([*words, "--new-tokens", "50"])
        load = importlib.import_module("served_load")
        few = [
            "--clients",
            "2",
            "--requests",
            "3",
            "--new-tokens",
            "8",
            "--rounds",
            "1",
            "--characters",
            "900",
        ]
        load.main([folder, "--ports", str(served.port), *few])
    out, err = capsys.readouterr()
    assert "1 left out: 50 tokens" in err
    speed, median, longest = map(float, out.splitlines()[-1].strip("| ").split("|")[1:])
    assert speed > 0 and 0 < median <= longest
    edit, tokens, without, predicted, *_ = [cell.strip() for cell in row.strip("|").split("|")]
    assert (edit, tokens) == ("1, same", "100")
    assert int(predicted) < 20 and int(predicted) < int(without) < 100
