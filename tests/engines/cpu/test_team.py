"""Whose threads the kernels run on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lookahead_hf.engines.cpu import team
from tests.helpers.compiled import run
from tests.helpers.models import tiny


def test_torchs_own_library_comes_before_those_of_other_packages() -> None:
    packages = Path(torch.__file__).resolve().parent.parent
    names = (
        "torch.libs/libgomp-a34b3233.so.1.0.0",
        "torch/lib/libgomp.so.1",
        "a_package.libs/libgomp-d22c30c5.so.1.0.0",
        "scikit_learn.libs/libgomp-d22c30c5.so.1.0.0",
    )
    paths = [str(packages / name) for name in names]
    others = [str(packages / "torch/lib/libtorch.so"), "/usr/lib/libgomp.so.1"]
    assert team.own_first([*reversed(paths), *others]) == sorted(paths[:2]) + sorted(
        [*paths[2:], others[1]]
    )


def test_without_torchs_threads_the_model_runs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "_parallel", lambda: None)
    assert run(tiny("llama"), True).execution == "compiled"  # on one thread
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert run(tiny("llama"), True).execution == "model"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot copy a process")
def test_a_forked_process_runs_the_kernels_on_one_thread() -> None:
    model = tiny("llama")
    expected = run(model, True)
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        os._exit(run(model, True) != expected)
    assert os.waitpid(child, 0)[1] == 0
