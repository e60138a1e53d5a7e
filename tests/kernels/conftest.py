"""Every kernel runs beside its twin: in Triton's interpreter, and compiled on a GPU.

A process has one of them. The interpreter's tests run where TRITON_INTERPRET is 1, as it is set
where there is no GPU and by `make test`; those on a GPU are marked `gpu`.
"""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is decorated, so it must stand before any kernel module is imported.
    os.environ["TRITON_INTERPRET"] = "1"

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the tensors of a test lie: its kernels are interpreted or compiled."""
    if (request.param == "cpu") != INTERPRETED:
        how = "interpreted" if INTERPRETED else "compiled"
        pytest.skip(f"kernels of this process are {how}: see TRITON_INTERPRET")
    return torch.device(request.param)


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
