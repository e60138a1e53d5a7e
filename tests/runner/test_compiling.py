"""Calls while numba compiles, where it fails, and where it is missing."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation import BaseStreamer

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting import session
from lookahead_hf.drafting.session import DraftSession
from lookahead_hf.ngram_pool import compilation
from lookahead_hf.rows import Rows
from lookahead_hf.stats import SpeculativeStats
from tests.helpers.compiling import nothing_compiled, settle
from tests.helpers.models import prompt, tiny
from tests.helpers.scripted import Scripted, right

pytest.importorskip("numba")

GREEDY = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}
JOINS = 12
"""Tokens after which compiling ends, for better or worse."""


class Ends(BaseStreamer):
    """Lets compiling end in the middle of a text."""

    def __init__(self, go: threading.Event) -> None:
        self.go, self.num_tokens = go, -1  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        self.num_tokens += 1
        if self.num_tokens == JOINS:
            self.go.set()
            settle()

    def end(self) -> None:
        pass


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    """What there is to compile; nothing has failed, and nothing has been said."""
    monkeypatch.setattr(session, "_has_warned", False)
    with nothing_compiled(monkeypatch) as pending:
        yield pending


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nodes of the draft of every step."""
    sizes: list[int] = []
    propose = DraftSession.propose

    def noted(self: DraftSession, rows: Rows) -> DraftTree:
        draft = propose(self, rows)
        sizes.append(draft.num_nodes)
        return draft

    monkeypatch.setattr(DraftSession, "propose", noted)
    return sizes


@pytest.fixture
def model() -> Any:
    """A model whose texts repeat themselves soon."""
    return lookahead_hf.enable(tiny("llama", scale=1.5))


@pytest.fixture
def plain(model: Any) -> list[list[int]]:
    return model.generate(prompt(), **GREEDY).tolist()


def generated(
    model: Any, plain: list[list[int]], **call: Any
) -> tuple[list[list[int]], SpeculativeStats]:
    """A text and how it came about, drafted from indexes and by a drafter of the caller."""
    own = Scripted([plain[0][12:]], right(1))
    config = SpeculativeConfig(drafters=("ngram", "recycling", own), budget=8)
    ids = model.generate(prompt(), **GREEDY, speculative=config, **call).tolist()
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None
    return ids, stats


def test_a_call_drafts_from_its_text_until_all_is_compiled(
    model: Any, plain: list[list[int]], work: list[Callable[[], None]], drafted: list[int]
) -> None:
    go = threading.Event()
    compilation.of_process.register(lambda: bool(go.wait(60)))
    ids, stats = generated(model, plain, streamer=Ends(go))
    assert ids == plain
    assert any(drafted[:4]) and stats.num_accepted > 0
    assert stats.per_source["ngram"].accepted > 0 and stats.per_source["scripted"].accepted > 0
    drafted.clear()
    ids, _ = generated(model, plain)
    assert ids == plain and drafted[0] > 0


def test_after_compiling_failed_calls_are_plain_until_it_succeeds(
    model: Any, plain: list[list[int]], work: list[Callable[[], None]], drafted: list[int]
) -> None:
    go = threading.Event()

    def fail() -> None:
        go.wait(60)
        raise MemoryError("too little memory")

    compilation.of_process.register(fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ids, stats = generated(model, plain, streamer=Ends(go))  # fails in its middle
        assert ids == plain
        drafted.clear()
        ids, stats = generated(model, plain)
        assert ids == plain and not any(drafted)
    (said,) = [str(each.message) for each in caught if each.category is RuntimeWarning]
    assert "calls decode plainly" in said and "MemoryError: too little memory" in said
    work[:] = [lambda: None]
    compilation.of_process.compile_now()
    ids, stats = generated(model, plain)
    assert ids == plain
    assert stats.per_source["ngram"].accepted > 0 < stats.per_source["scripted"].accepted


WITHOUT = """
import sys, threading, warnings
if sys.argv[1] == "missing":
    sys.modules["numba"] = None
else:
    sys.path.insert(0, sys.argv[2])
import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.ngram_pool import NgramPool
from tests.helpers.models import prompt, tiny

model = lookahead_hf.enable(tiny("llama", scale=1.5))
greedy = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
plain = model.generate(prompt(), **greedy)
asked = [True, True, SpeculativeConfig(drafters=("pool",)), True]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for speculative in asked:
        given = {"prediction": plain[0, 12:].tolist()} if speculative is True else {}
        ids = model.generate(prompt(), **greedy, **given, speculative=speculative)
        stats = lookahead_hf.last_stats(model)
        assert ids.tolist() == plain.tolist() and stats.fallback_reason is None
        for thread in threading.enumerate():
            if "compile" in thread.name:
                thread.join()
        assert stats.num_steps == 23 and stats.num_drafted == 0
    lookahead_hf.warm_up(model, context_length=20, max_draft_nodes=2)
for each in caught:
    if "numba" in str(each.message):
        print(each.message)
try:
    NgramPool()
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("missing", "is not installed"), ("broken", "ImportError: Numba needs NumPy 2.3 or less")],
)
def test_without_a_numba_that_works_calls_go_on(tmp_path: Path, kind: str, reason: str) -> None:
    (tmp_path / "numba.py").write_text('raise ImportError("Numba needs NumPy 2.3 or less")')
    command = [sys.executable, "-c", WITHOUT, kind, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said, refused = done.stdout.splitlines()
    assert "calls decode plainly" in said and reason in said
    assert refused.startswith("drafting needs numba") and reason in refused
