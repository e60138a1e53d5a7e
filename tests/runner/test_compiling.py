"""Calls while numba compiles, where it fails, and where it is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation import BaseStreamer

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting.session import DraftSession
from lookahead_hf.ngram_pool import compilation
from lookahead_hf.rows import Rows
from lookahead_hf.stats import SpeculativeStats
from tests.helpers.compared import served
from tests.helpers.compiling import Elsewhere, nothing_compiled
from tests.helpers.models import prompt, tiny
from tests.helpers.scripted import Scripted, right

pytest.importorskip("numba")

GREEDY = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}
JOINS = 12  # Tokens after which compiling ends, for better or worse


class Ends(BaseStreamer):
    """Lets something happen in the middle of a text."""

    def __init__(self, happen: Callable[[], object]) -> None:
        self.happen, self.num_tokens = happen, -1  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        self.num_tokens += 1
        if self.num_tokens == JOINS:
            self.happen()

    def end(self) -> None:
        pass


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    """A process that compiles what drafting needs."""
    with nothing_compiled(monkeypatch) as pending:
        pending.append(bool)
        child = Elsewhere()
        monkeypatch.setattr(compilation.drafting, "child", child)
        monkeypatch.setattr(compilation.drafting, "is_on_disk", lambda: child.status == "")
        yield child


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
    stats = served(model)
    return ids, stats


def test_a_call_drafts_as_soon_as_all_is_compiled(
    model: Any, plain: list[list[int]], child: Elsewhere, drafted: list[int]
) -> None:
    ids, stats = generated(model, plain, streamer=Ends(lambda: setattr(child, "status", "")))
    assert ids == plain and stats.num_accepted > 0
    assert stats.num_undrafted == drafted.index(next(filter(None, drafted))) > JOINS - 3
    assert f"{stats.num_undrafted} steps of {stats.row_steps} drafted nothing" in str(stats)
    drafted.clear()
    ids, stats = generated(model, plain)
    assert ids == plain and drafted[0] > 0 and stats.num_undrafted == 0


def test_after_compiling_has_failed_calls_are_plain(
    model: Any, plain: list[list[int]], child: Elsewhere, drafted: list[int]
) -> None:
    with pytest.warns(
        RuntimeWarning, match="decode plainly.*killed.*`lookahead-hf compile`"
    ) as said:
        ids, _ = generated(model, plain, streamer=Ends(lambda: setattr(child, "status", "killed")))
        assert ids == plain and not any(drafted)
        ids, stats = generated(model, plain)
        assert ids == plain and not any(drafted) and stats.num_undrafted == 0
    assert len([each for each in said if each.category is RuntimeWarning]) == 1
    compilation.drafting.retry()
    child.status = ""
    compilation.drafting.child = child  # type: ignore[assignment]
    ids, stats = generated(model, plain)
    assert ids == plain
    assert stats.per_source["ngram"].accepted > 0 < stats.per_source["scripted"].accepted


KINDS = {
    "missing": "is not installed",
    "broken": "ImportError: Numba needs NumPy 2.3 or less",
    "nothing compiled": "a packaged program has no interpreter to start",
}
"""Why a process has no compiled functions, and what it says of that."""

WITHOUT = """
import os, sys, warnings
from tests.helpers.models import prompt, tiny

model = tiny("llama", scale=1.5)
for kind in sys.argv[2:]:
    if os.fork() == 0:
        break
    _, status = os.wait()
    assert status == 0
else:
    sys.exit()
if kind == "missing":
    sys.modules["numba"] = None
elif kind == "broken":
    sys.path.insert(0, sys.argv[1])
else:
    from numba.core import compiler

    def compiles(*_, **__):
        raise SystemExit("this process compiles")

    compiler.CompilerBase.__init__ = compiler.compile_extra = compiles
    sys.executable = ""  # so that no other process can
import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.ngram_pool import NgramPool

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    lookahead_hf.enable(model)
    greedy = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    plain = model.generate(prompt(), **greedy)
    asked = [True, True, SpeculativeConfig(drafters=("pool",)), True]
    for speculative in asked:
        given = {"prediction": plain[0, 12:].tolist()} if speculative is True else {}
        ids = model.generate(prompt(), **greedy, **given, speculative=speculative)
        stats = lookahead_hf.last_stats(model)
        assert ids.tolist() == plain.tolist() and stats.fallback_reason is None
        assert stats.num_steps == 23 and stats.num_drafted == 0 and stats.execution == "model"
    lookahead_hf.warm_up(model, context_length=20, max_draft_nodes=2)
for each in caught:
    if "numba" in str(each.message):
        print(each.message)
try:
    NgramPool().add([1, 2, 3])
except ImportError as error:
    print(error)
"""


def test_without_compiled_functions_calls_go_on(tmp_path: Path) -> None:
    """Each in a process of its own, a fork of one that has imported what all of them need."""
    (tmp_path / "numba.py").write_text('raise ImportError("Numba needs NumPy 2.3 or less")')
    command = [sys.executable, "-c", WITHOUT, str(tmp_path), *KINDS]
    empty = {"NUMBA_CACHE_DIR": str(tmp_path / "empty"), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | empty)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for said, refused, reason in zip(lines[::2], lines[1::2], KINDS.values(), strict=True):
        assert "calls decode plainly" in said and reason in said
        assert refused.startswith("drafting needs numba") and reason in refused
