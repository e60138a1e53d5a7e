"""When numba's functions are ready, what a failure costs, and that no call waits for a compiler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lookahead_hf.ngram_pool import NumbaMissingError, compilation
from lookahead_hf.ngram_pool.compilation import Child, CompilingError, Functions
from tests.helpers.compiling import Elsewhere

pytest.importorskip("numba")

from numba.core import config

from lookahead_hf.ngram_pool import jit


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of compiled code, which is empty; nobody has been warned."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compilation, "_has_warned", False)
    return jit.folder_of(tmp_path)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Elsewhere]:
    """The processes that were started."""
    started: list[Elsewhere] = []

    def start(names: list[str], is_awaited: bool = False) -> Elsewhere:
        started.append(Elsewhere(names))
        return started[-1]

    monkeypatch.setattr(compilation, "Child", start)
    return started


def group_of(*pieces: Callable[[], object], name: str = "toy") -> Functions:
    group = Functions(name)
    group.register(*pieces)
    return group


def mark(folder: Path, *names: str) -> None:
    """Say that groups are compiled, as the other process does."""
    folder.mkdir(exist_ok=True)
    for name in names or ("toy",):
        Path(folder, jit.key_of(name)).touch()


def test_a_step_never_waits_for_the_process_that_compiles(
    children: list[Elsewhere], folder: Path
) -> None:
    done: list[int] = []
    group = group_of(lambda: done.append(1))
    start = time.monotonic()
    for _ in range(3):
        assert not group.ready() and group.is_available() and not group.is_loaded()
    assert time.monotonic() - start < 1.0 and not done
    assert [each.names for each in children] == [["toy"]]
    mark(folder)  # while the process goes on with other groups
    assert group.ready() and group.is_loaded() and done == [1]


def test_a_step_loads_for_a_moment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(compilation.time, "monotonic", lambda: now[0])
    mark(folder)

    def piece() -> None:
        now[0] += 0.03

    group = group_of(*[piece] * 5)
    left = []
    while not group.ready(0.05):
        left.append(len(group.pending))
    assert left == [3, 1]


def test_one_process_compiles_what_is_missing_in_the_order_of_need(
    children: list[Elsewhere], folder: Path
) -> None:
    first, second, third = (group_of(bool, name=name) for name in ("first", "second", "third"))
    mark(folder, "second")
    compilation.request([first, second, third])
    assert [each.names for each in children] == [["first", "third"]]
    assert first.child is third.child and second.child is None
    compilation.request([first, second, third])
    assert len(children) == 1


def test_a_process_that_fails_costs_one_warning_until_it_is_tried_again(
    children: list[Elsewhere], folder: Path
) -> None:
    groups = [group_of(lambda: pytest.fail("it is not compiled"), name=name) for name in "ab"]
    compilation.request(groups)
    children[0].status = "OSError: No space left on device"
    with pytest.warns(RuntimeWarning, match="No space left.*`lookahead-hf compile`") as warned:
        for each in (*groups, *groups):
            assert not each.ready() and not each.is_available()
    assert len(warned) == 1 and len(children) == 1  # calls do not try again
    with pytest.raises(NumbaMissingError, match="No space left"):
        groups[0].check_available()
    groups[0].retry()
    assert not groups[0].ready() and groups[0].is_available() and len(children) == 2
    mark(folder, "a")
    groups[0].pending[:] = [bool]
    assert groups[0].ready()


@pytest.mark.parametrize("again", ["is there", "is missing again"])
def test_a_function_that_should_be_on_disk_is_compiled_again(
    children: list[Elsewhere], folder: Path, again: str
) -> None:
    asked: list[int] = []

    def piece() -> None:
        asked.append(1)
        if len(asked) == 1 or again != "is there":
            raise jit.NotCompiledError("it is damaged")

    group = group_of(piece)
    mark(folder)
    assert not group.ready() and not group.ready() and group.is_available()
    assert len(children) == len(asked) == 1
    mark(folder)
    if again == "is there":
        assert group.ready()
        return
    with pytest.warns(RuntimeWarning, match="it is damaged"):
        assert not group.ready() and not group.is_available()


def test_what_loading_raises_ends_no_call(folder: Path) -> None:
    def piece() -> None:
        raise MemoryError("too little memory")

    group = group_of(piece)
    mark(folder)
    with pytest.warns(RuntimeWarning, match="does not work here .MemoryError: too little memory"):
        assert not group.ready() and not group.is_available()


@pytest.mark.parametrize("loads", [False, True])
def test_a_process_that_is_forked_in_mid_loading_loads_nothing(folder: Path, loads: bool) -> None:
    group = group_of(bool)
    mark(folder)
    if loads:
        group._lock.acquire()
    group.child = Elsewhere()  # type: ignore[assignment]
    group.forget_threads()  # which a fork calls
    assert group.child is None
    assert group.ready() == group.is_available() == (not loads)


def test_another_thread_that_loads_is_not_waited_for(folder: Path) -> None:
    group = group_of(bool)
    mark(folder)
    with group._lock:
        assert not group.ready() and group.is_available()
    assert group.ready()


def test_who_asks_for_functions_waits(
    children: list[Elsewhere], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            mark(folder)

    monkeypatch.setattr(compilation.time, "sleep", sleep)
    group, other = group_of(bool), group_of(bool, name="other")
    compilation.wait([group])
    assert group.is_loaded() and len(waits) == 3
    compilation.wait([other], seconds=0.0)
    assert not other.is_loaded() and other.is_available()
    mark(folder, "other")
    other.require()


def ended(child: Child) -> str:
    """The reason of a process that is about to end."""
    end = time.monotonic() + 300  # it is polite
    while (reason := child.end()) is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    return reason


def test_a_process_that_is_killed_says_so() -> None:
    child = Child(["drafting"])
    os.kill(child._process.pid, signal.SIGKILL)
    assert ended(child) == "the process that compiles ended by signal 9"


@pytest.mark.parametrize("how", ["frozen", "forbidden", "no interpreter"])
def test_a_process_that_cannot_start_costs_the_functions(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError("no more processes")

    if how == "forbidden":
        monkeypatch.setattr(subprocess, "Popen", forbidden)
    elif how == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    else:
        monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(CompilingError):
        Child(["drafting"])
    group = group_of(bool)
    with pytest.warns(RuntimeWarning, match="`lookahead-hf compile` tries again"):
        assert not group.ready() and not group.is_available()


def test_it_imports_as_this_process_does_and_its_last_line_is_the_reason_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / """some "folder's" {name}"""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import pathlib; pathlib.Path(__file__).with_name('found').touch()"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # no import reads a Path
    assert ended(Child(["no such group"])) == "no such group: KeyError: 'no such group'"
    assert (folder / "found").exists()


PARENT = """
import time
from lookahead_hf.ngram_pool.compilation import Child
print(Child(["drafting"])._process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for the process in /proc")
def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        process = Path("/proc", parent.stdout.readline().strip(), "cmdline")
        assert b"lookahead_hf" in process.read_bytes()
        parent.kill()
    end = time.monotonic() + 300
    while process.exists() and process.read_bytes():  # one that has ended has an empty one
        assert time.monotonic() < end, "it goes on"
        time.sleep(0.05)
