"""Every kernel runs beside its twin: in Triton's interpreter, and compiled on a GPU.

A process has one of them. The interpreter's tests run where TRITON_INTERPRET is 1, as it is set
where there is no GPU and by `make test`; those on a GPU are marked `gpu`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

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


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Kernels everywhere, verification on the device; counts the calls of each kernel."""
    from lookahead_hf import kernels

    counted: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(kernels, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return original(*args, **kwargs)

        return call

    monkeypatch.setenv("LOOKAHEAD_HF_BACKEND", "triton")
    for name in ("verify_tree", "compact_path", "tree_attention", "topk_rows", "reject_tree"):
        monkeypatch.setattr(kernels, name, counting(name))
    from tests.helpers.device import on_device

    with on_device(monkeypatch):
        yield counted


@pytest.fixture
def attention_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch attends, as the kernel takes seconds in the interpreter."""
    from lookahead_hf.runner import attention

    monkeypatch.setattr(attention, "kernel_is_faster", lambda *_: False)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attention of the kernel is compared with one under the mask that it replaces."""
    from lookahead_hf.runner import attention
    from tests.helpers.trees import under_mask

    attend = attention.attend_by_kernel

    def checking(block: Any, held: Any, *args: Any) -> torch.Tensor:
        got = attend(block, held, *args)
        torch.testing.assert_close(
            got, under_mask(block.additive(held.kind.name), *args), atol=2e-5, rtol=2e-5
        )
        return got

    monkeypatch.setattr(attention, "attend_by_kernel", checking)
