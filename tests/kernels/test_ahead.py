"""Kernels are compiled in a thread beside the first call, whose launches wait for no others."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from lookahead_hf.drafting.sources.recycling import RecyclingDrafter
from lookahead_hf.kernels import _launch, ahead
from tests.helpers.processes import run

CPU, NOTHING = torch.device("cpu"), torch.empty(1, device="meta")


class Kernel:
    """A kernel whose compilation lasts until it may end."""

    def __init__(self) -> None:
        self.compiled: list[int] = []
        self.launched: list[int] = []
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def warmup(self, *, grid: Any, SIZE: int, **_: Any) -> None:
        self.has_begun.set()
        assert self.may_end.wait(60)
        self.compiled.append(SIZE)

    def run(self, *, SIZE: int, **_: Any) -> None:
        self.launched.append(SIZE)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run

    def launch(self, size: int, on: torch.Tensor) -> None:
        _launch.launch(self, (1,), on, x_ptr=on, SIZE=size, num_warps=4)


def begin(compile_steps: Callable[[], object]) -> None:
    """Compile these steps beside the test."""
    ahead.compile_beside(CPU, compile_steps)


def end() -> None:
    for thread in list(_launch.threads):
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    end()
    ahead._known.clear()
    _launch._begun.clear()


def test_a_launch_waits_for_its_own_variant_alone() -> None:
    kernel, tensor = Kernel(), torch.zeros(1)
    begin(lambda: kernel.launch(16, NOTHING))
    assert kernel.has_begun.wait(60)
    kernel.launch(32, tensor)
    kernel.launch(16, tensor.half())
    assert kernel.launched == [32, 16] and not kernel.compiled
    waiting = threading.Thread(target=lambda: kernel.launch(16, tensor))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    kernel.may_end.set()
    waiting.join(60)
    assert (kernel.compiled, kernel.launched) == ([16], [32, 16, 16])


def test_a_variant_that_a_step_compiles_is_left_to_it() -> None:
    """The thread waits until it is compiled."""
    kernel, other, tensor = Kernel(), Kernel(), torch.zeros(1)
    begin(lambda: (other.launch(1, NOTHING), kernel.launch(16, NOTHING)))
    launching, launched = threading.Event(), threading.Event()

    def launch(**_: Any) -> None:
        launching.set()
        assert launched.wait(60)

    kernel.may_end.set()
    kernel.run = launch  # type: ignore[method-assign]
    step = threading.Thread(target=lambda: kernel.launch(16, tensor))
    step.start()
    assert launching.wait(60)
    other.may_end.set()
    assert not kernel.has_begun.wait(0.2)
    launched.set()
    end()
    assert kernel.compiled == [16]


def test_errors_of_the_thread_do_not_reach_a_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A launch compiles what the thread could not, and raises where it cannot either."""
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    kernel, tensor = Kernel(), torch.zeros(1)

    def fails(**_: Any) -> None:
        raise RuntimeError("no compiler")

    kernel.warmup = fails  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO, ahead.__name__):
        begin(lambda: kernel.launch(16, NOTHING))
        end()
    kernel.launch(16, tensor)
    assert kernel.launched == [16]
    assert not raised
    assert "compiled when they are first launched: no compiler" in caplog.text


def test_steps_of_a_kind_are_compiled_once() -> None:
    kernel = Kernel()
    kernel.may_end.set()
    for _ in range(3):
        begin(partial(kernel.launch, 16, NOTHING))
        end()
    assert kernel.compiled == [16]


def test_a_process_ends_with_the_kernel_that_the_thread_has_begun() -> None:
    code = (
        "import time, torch\n"
        "from lookahead_hf.kernels import _launch, ahead\n"
        "nothing = torch.empty(1, device='meta')\n"
        "class Kernel:\n"
        "    def warmup(self, **_): print('compiled', flush=True); time.sleep(0.3)\n"
        "kernel = Kernel()\n"
        "def compile():\n"
        "    for size in range(50): _launch.launch(kernel, (1,), nothing, SIZE=size)\n"
        "ahead.compile_beside(torch.device('cpu'), compile)\n"
        "time.sleep(0.1)\n"
    )
    done = run("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert 1 <= done.stdout.count("compiled") <= 3


def test_it_compiles_for_what_recycling_asks() -> None:
    fields = inspect.signature(RecyclingDrafter).parameters
    asked = fields["num_next"].default, fields["top_k"].default
    assert asked == (ahead.BEST_TOKENS, ahead.FEW_TOKENS)


@pytest.mark.parametrize(
    ("name", "how", "variants"),
    [("llama", "greedy", 7), ("llama", "sampled", 8), ("gemma3", "greedy", 9)],
)
def test_steps_compile_nothing_that_the_thread_has(name: str, how: str, variants: int) -> None:
    """All that the steps of a whole call launch, by Triton's own keys."""
    done = run("-m", "tests.helpers.first_call", name, how)
    assert done.returncode == 0, done.stderr
    beside, launched, *by_steps = done.stdout.split()
    assert int(beside) == variants
    assert int(launched) == 6
    assert not by_steps
