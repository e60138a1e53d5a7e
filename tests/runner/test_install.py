"""Changes to a shared model: an interrupt at any line leaves it as it was found."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from types import FrameType
from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf.generation import decode
from lookahead_hf.model import compat
from lookahead_hf.runner import attention, forward
from lookahead_hf.runner import patched as patched_module
from lookahead_hf.runner.patched import patched
from tests.helpers.models import prompt, tiny

ROOMS = (attention, forward, patched_module)


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that is run in some modules, as SIGINT may.

    Python handles no signal between the end of a `with` block and the call that releases its lock,
    although it traces the line of the `with` once more there.
    """

    def __init__(self, line: int, modules: tuple[Any, ...]) -> None:
        self.left, self.files = line, {module.__file__ for module in modules}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and "with _lock" not in source:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def interrupted(modules: tuple[Any, ...], call: Callable[[], object]) -> Iterator[int]:
    """Interrupt the call at each of its lines in turn; yield the line after each time."""
    outer = sys.gettrace()
    for line in count(1):
        sys.settrace(Interrupt(line, modules))
        try:
            call()
            return
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(outer)
        yield line


def state(model: Any) -> list[Any]:
    """All that the changes touch."""
    own = [sorted(vars(module)) for module in model.modules()]
    names = [compat.attention_name(config) for config in compat.configs_of(model.modules())]
    return [names, own, torch.backends.cuda.cudnn_sdp_enabled()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "is_nested"),
    [("attention", True), ("table", False), ("bias", False), ("cudnn", False)],
)
def test_an_interrupt_at_any_line(what: str, is_nested: bool) -> None:
    makes: dict[str, tuple[Any, Callable[[Any], AbstractContextManager[None]]]] = {
        "attention": (tiny("gemma3"), patched),
        "table": (tiny("bart"), patched),
        "bias": (tiny("t5"), patched),
        "cudnn": (tiny("llama"), lambda _: forward.without_cudnn()),
    }
    model, context = makes[what]

    def make() -> AbstractContextManager[None]:
        return context(model)

    before = state(model)
    with make():
        within = state(model)
    assert within != before

    def call() -> None:
        with make():
            assert state(model) == within

    outside = make() if is_nested else nullcontext()
    with outside:
        for line in interrupted(ROOMS, call):  # noqa: B007
            assert state(model) == (within if is_nested else before)
    assert state(model) == before
    assert line > 15


def test_an_interrupt_where_a_call_begins_or_ends() -> None:
    model = lookahead_hf.enable(tiny("llama"))
    before, config = state(model), {"budget": 2}
    call = {"max_new_tokens": 3, "do_sample": False, "speculative": config}
    modules = (decode, forward)
    for line in interrupted(modules, lambda: model.generate(prompt(), **call)):  # noqa: B007
        assert state(model) == before
    assert state(model) == before
    assert line > 30
