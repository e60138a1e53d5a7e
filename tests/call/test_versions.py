"""A version of transformers that works in an unknown way is named as the reason, never hidden."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import lookahead_hf
from lookahead_hf import FallbackReason, SpeculationFallbackWarning
from lookahead_hf.call import admission
from lookahead_hf.fallback import TRANSFORMERS
from lookahead_hf.model import compat
from lookahead_hf.model.compat import forwards
from tests.helpers.calls import GREEDY, prompt
from tests.helpers.compared import compared
from tests.helpers.models import tiny


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    """Forget what the process knows of transformers, before and after each test."""
    known = admission._stock_refusal, forwards._signature
    for each in known:
        each.cache_clear()
    yield
    for each in known:
        each.cache_clear()


def test_this_version_is_known() -> None:
    state = torch.get_rng_state()
    admission.check_version()
    assert torch.equal(state, torch.get_rng_state())


def _renamed_argument(forward: Any) -> Any:
    def renamed(self: Any, input_ids: Any = None, kv_states: Any = None, **more: Any) -> Any:
        return forward(self, input_ids, **more)

    renamed.__module__ = forward.__module__
    return renamed


def test_a_renamed_argument_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lookahead_hf.enable(tiny("llama"))
    own = LlamaForCausalLM.forward
    call = {"input_ids": prompt(), **GREEDY}
    expected = model.generate(**call)
    monkeypatch.setattr(LlamaForCausalLM, "forward", _renamed_argument(own))
    monkeypatch.setattr(compat, "IS_TESTED", False)
    with pytest.warns(SpeculationFallbackWarning, match=r"\[version\].*pip install") as found:
        got = model.generate(**call, speculative=True)
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is FallbackReason.VERSION
    assert f"transformers{TRANSFORMERS}" in str(found[0].message)
    assert torch.equal(got, expected)


def test_an_untested_version_is_asked_before_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lookahead_hf.enable(tiny("llama"))
    monkeypatch.setattr(compat, "IS_TESTED", False)
    compared(model, lambda: {"input_ids": prompt(), **GREEDY}, 12)
    admission._stock_refusal.cache_clear()
    monkeypatch.setattr(admission.self_test, "fault", lambda *_, **__: "it gives other logits")
    with pytest.warns(SpeculationFallbackWarning, match=r"it gives other logits.*\[version\]"):
        model.generate(prompt(), **GREEDY, speculative=True)


PROGRAM = """
from transformers import cache_utils
del cache_utils.StaticLayer
import lookahead_hf
lookahead_hf.enable
"""


def test_a_missing_class_is_reported() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError") and "StaticLayer" in last
    assert f"pip install 'transformers{TRANSFORMERS}'" in last


def test_the_package_installs_beside_tested_versions_alone() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    ranges = re.findall(r'"transformers(?:\[\w+\])?([<>=].*?)"', project)
    assert {*ranges} == {TRANSFORMERS}
