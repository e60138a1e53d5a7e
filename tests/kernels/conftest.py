"""Every kernel runs beside its twin: compiled on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is decorated, so it must stand before any kernel module is imported.
    os.environ["TRITON_INTERPRET"] = "1"

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture(params=["reference", "triton"])
def impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`lookahead_hf.kernels` with one backend behind it."""
    from lookahead_hf import kernels

    chosen = "triton" if request.param == "triton" else "torch"
    monkeypatch.setenv("LOOKAHEAD_HF_BACKEND", chosen)
    return kernels


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten shows up as NaN or -7."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(autouse=True)
def checked_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter ignores names that a kernel does not have; a GPU would refuse the launch."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def checked(self: InterpretedFunction, *args: object, **kwargs: object) -> object:
        options = set(kwargs) - set(self.arg_names) - {"grid", "warmup"}
        assert options <= {"num_warps", "num_stages", "enable_fp_fusion"}
        assert "enable_fp_fusion" in options
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", checked)
