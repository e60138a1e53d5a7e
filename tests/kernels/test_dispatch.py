"""Which backend serves which device, and what importing it costs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from lookahead_hf import kernels
from lookahead_hf.kernels import _common, attention, reference, tree

CPU = torch.device("cpu")


@pytest.fixture
def capabilities(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, tuple[int, int]]]:
    """Compute capability of GPUs that are not there, by index."""
    known = {0: (7, 5), 1: (8, 0), 2: (8, 6), 3: (9, 0), 4: (10, 0), 5: (12, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: known[d.index])
    monkeypatch.setattr(_common, "try_launch", lambda device: None)
    caches = kernels._has_triton, attention.num_stages
    for cache in caches:
        cache.cache_clear()
    yield known
    for cache in caches:
        cache.cache_clear()


def test_backend_by_device(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[int, tuple[int, int]]
) -> None:
    monkeypatch.delenv("LOOKAHEAD_HF_BACKEND", raising=False)
    assert kernels.backend(CPU) == "torch"
    chosen = [kernels.backend(torch.device("cuda", index)) for index in capabilities]
    assert chosen == ["torch"] + ["triton"] * 5
    monkeypatch.setenv("LOOKAHEAD_HF_BACKEND", "torch")
    assert kernels.backend(torch.device("cuda", 3)) == "torch"


def test_a_first_launch_that_fails_leaves_the_device_to_torch(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[int, tuple[int, int]]
) -> None:
    """As without a C compiler; the warning comes once."""
    tried = []

    def launch(device: torch.device) -> None:
        tried.append(device.index)
        if device.index != 3:
            raise RuntimeError("Failed to find C compiler\nand more")

    monkeypatch.delenv("LOOKAHEAD_HF_BACKEND", raising=False)
    monkeypatch.setattr(_common, "try_launch", launch)
    said = "Triton cannot run on cuda:1.*: RuntimeError: Failed to find C compiler. Triton needs"
    with pytest.warns(RuntimeWarning, match=said) as warned:
        chosen = [kernels.backend(torch.device("cuda", index)) for index in (1, 3, 1, 3)]
    assert chosen == ["torch", "triton"] * 2
    assert (tried, len(warned)) == ([1, 3], 1)


def test_the_trial_is_a_launch(device: torch.device) -> None:
    _common.try_launch(device)


def test_errors_of_later_launches_are_shown(
    monkeypatch: pytest.MonkeyPatch, impl: ModuleType
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a mistake of ours")

    for each in (reference, tree):
        monkeypatch.setattr(each, "verify_tree", fails)
    one = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="of ours"):
        impl.verify_tree(torch.eye(5)[None, 2:3], one, one - 1, one[0])


def test_stages_fit_the_shared_memory(capabilities: dict[int, tuple[int, int]]) -> None:
    stages = [attention.num_stages(torch.device("cuda", i), 128) for i in capabilities]
    assert stages == [2, 2, 2, 3, 3, 2]
    assert attention.num_stages(torch.device("cuda", 3), 256) == 2


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
        "from lookahead_hf.kernels.data import PathTable\n"
        "one = torch.zeros(1, 1, dtype=torch.int64)\n"
        "walk = kernels.verify_tree(torch.eye(5)[None, 2:3], one, one - 1, one[0])\n"
        "table = PathTable([torch.zeros(1, 4, 2)])\n"
        "kernels.compact_path(table, one[0], walk.path, walk.num_accepted + 1)\n"
        "print(walk.bonus.item(), kernels.topk_rows(torch.eye(5), 1)[1][:, 0].tolist())\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "LOOKAHEAD_HF_BACKEND"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout.split(maxsplit=1) == ["2", "[0, 1, 2, 3, 4]\n"], done.stderr
