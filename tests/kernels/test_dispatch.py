"""dispatch: which backend serves which device, and what importing it costs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from lookahead_hf import kernels

CPU = torch.device("cpu")


def test_backend_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOOKAHEAD_HF_BACKEND", raising=False)
    assert kernels.backend(CPU) == "torch"
    assert kernels.backend(torch.device("cuda")) == "triton"


def test_backend_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKAHEAD_HF_BACKEND", "torch")
    assert kernels.backend(torch.device("cuda")) == "torch"
    monkeypatch.setenv("LOOKAHEAD_HF_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.backend(CPU) == "triton"


def test_unusable_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKAHEAD_HF_BACKEND", "numba")
    with pytest.raises(ValueError, match="set it to 'triton' or 'torch'"):
        kernels.backend(CPU)
    monkeypatch.setenv("LOOKAHEAD_HF_BACKEND", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        kernels.backend(CPU)


def test_twins_need_no_triton() -> None:
    """On a CPU neither importing nor using the kernels loads Triton or numba."""
    code = (
        "import sys, torch; sys.modules['triton'] = sys.modules['numba'] = None\n"
        "from lookahead_hf import kernels\n"
        "one = torch.zeros(1, 1, dtype=torch.int64)\n"
        "walk = kernels.verify_tree(torch.eye(5)[None, 2:3], one, one - 1, one[0])\n"
        "kernels.compact_path([torch.zeros(1, 4, 2)], one[0], walk.path, walk.num_accepted + 1)\n"
        "print(walk.bonus.item(), kernels.topk_rows(torch.eye(5), 1)[1][:, 0].tolist())\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "LOOKAHEAD_HF_BACKEND"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout.split(maxsplit=1) == ["2", "[0, 1, 2, 3, 4]\n"], done.stderr
