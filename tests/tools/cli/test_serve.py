"""`lookahead-hf serve`."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import AutoTokenizer

from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.ngram_pool.pool import open_pool
from lookahead_hf.tools.cli import main
from lookahead_hf.tools.cli.commands.serve import NEEDS
from tests.helpers.commands import Run
from tests.helpers.served import free_port, running


def _server_packages() -> Any:
    """uvicorn; skips the test if a package of the extra is missing."""
    return [pytest.importorskip(name) for name in (*NEEDS, "uvicorn")][-1]


def test_the_command_serves_a_model_with_its_options(
    folder: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    uvicorn = _server_packages()
    pool = NgramPool(1000)
    for name in ("pool", "own"):
        pool.save(f"{name}.safetensors")
    port, wait = free_port(), uvicorn.Server.run
    answers: list[Any] = []

    def ask(server: Any) -> None:
        """In place of waiting for requests: make two, and fill the pool that one of them names."""
        monkeypatch.setattr(uvicorn.Server, "run", wait)
        asked: dict[str, Any] = {"prompt": "abc", "max_tokens": 30, "temperature": 0}
        named = {"speculative": {"drafters": ["pool"], "pool": "own", "budget": 6}}
        with running(server, port) as client:
            answers.append(client.completions.create(model=folder, **asked))
            text = f"abc{answers[0].choices[0].text}"
            open_pool("own.safetensors").add(AutoTokenizer.from_pretrained(folder)(text).input_ids)
            answers.append(client.completions.create(model=folder, **asked, extra_body=named))

    monkeypatch.setattr(uvicorn.Server, "run", ask)
    monkeypatch.setattr("lookahead_hf.warm_up", lambda model: None)
    ours = ["--pool", "pool.safetensors", "--pool", "own=own.safetensors"]
    ours += ["--config", '{"budget": 6}']
    theirs = ["--port", str(port), "--host", "localhost", "--device", "cpu"]
    run("serve", *ours, *theirs, folder)
    counts, of_named = (answer.metrics["speculative_decoding"] for answer in answers)
    assert counts["num_accepted_draft_tokens"] > 0
    assert len(counts["acceptance_histogram"]) <= 7
    assert of_named["num_accepted_draft_tokens"] > 0
    assert answers[1].choices[0].text == answers[0].choices[0].text


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--config", '{"budget": -1}'], 2, "an int in 0..64"),
        (["--config", '{"pool": "missing"}'], 1, "'missing' cannot be read"),
        (["--pool", "own=missing.safetensors"], 1, "'missing.safetensors' cannot be read"),
        (["--dtype", "float99", "/no/such/model"], 1, "float99"),
        (["--no-such-option"], 2, "no-such-option"),
        (["/no/such/model"], 1, "did not start"),
        ([], 1, "name the MODEL to serve"),
        (["--max-seconds", "nan"], 1, "the limit seconds is nan"),
    ],
)
def test_what_is_wrong_is_said_before_the_server_starts(
    words: list[str], code: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    _server_packages()
    assert main(["serve", "--port", "0", *words]) == code
    assert message in re.sub(r"\s+", " ", capfd.readouterr().err)


def test_without_the_packages_the_command_names_them(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr("lookahead_hf.tools.cli.commands.serve.NEEDS", ("json", "no_such_package"))
    error = run("serve", "m", code=1).err
    assert "no_such_package" in error and "pip install '.[serve]'" in error
