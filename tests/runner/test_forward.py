"""One object holds what is in force in a forward, on each thread."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from lookahead_hf import runner
from lookahead_hf.runner.forward import ForwardContext, current, running

ROOM = Path(runner.__file__).parent
CPU = torch.device("cpu")


def thread_locals() -> Iterator[str]:
    for path in sorted(ROOM.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            if name in ("local", "ContextVar", "get_ident", "current_thread"):
                yield path.relative_to(ROOM).as_posix()


def test_the_room_has_one_thread_local() -> None:
    assert list(thread_locals()) == ["forward.py"]


def test_forwards_nest_and_threads_have_their_own() -> None:
    outer, inner = ForwardContext(), ForwardContext()
    seen: list[ForwardContext | None] = []
    with running(outer, CPU):
        with running(inner, CPU):
            assert current() is inner
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
        assert current() is outer
    assert seen == [None] and current() is None
