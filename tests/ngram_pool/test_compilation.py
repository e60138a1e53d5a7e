"""When numba's functions are ready, what a failure costs, and what of them is kept on disk."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lookahead_hf.ngram_pool import NumbaMissingError, compilation, of_process
from tests.helpers.compiling import nothing_compiled, settle

pytest.importorskip("numba")

from numba.core import config
from numba.core.caching import IndexDataCacheFile

from lookahead_hf.ngram_pool import jit

TOY = """
from lookahead_hf.ngram_pool.jit import jit

@jit
def inner(x):
    return x + 1

@jit
def double(x):
    return 2 * inner(x)
"""


@pytest.fixture(autouse=True)
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    with nothing_compiled(monkeypatch) as pending:
        yield pending


def test_a_call_waits_only_while_compiling() -> None:
    go = threading.Event()
    of_process.register(lambda: bool(go.wait(60)))
    assert not of_process.ready() and not of_process.ready()
    assert of_process.available() and not of_process.compiled()
    go.set()
    settle()
    assert of_process.ready() and of_process.compiled()


def test_only_the_call_that_begins_to_load_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    go, waited = threading.Event(), list[float | None]()
    of_process.register(lambda: bool(go.wait(60)))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", lambda _, timeout: waited.append(timeout))
        for _ in range(2):
            of_process.wait_until_loaded(2.0)
    go.set()
    assert waited == [2.0]


def test_what_failed_is_compiled_again_on_request() -> None:
    seen: list[bool] = []

    def compile_later() -> None:
        seen.append(of_process.available())
        if len(seen) == 1:
            raise MemoryError("too little memory")

    of_process.register(compile_later)
    for _ in range(3):
        of_process.ready()
        settle()
    assert not of_process.ready() and not of_process.available()
    with pytest.raises(NumbaMissingError, match="does not work here .MemoryError: too little"):
        of_process.check_available()
    assert len(seen) == 1  # calls do not try again
    of_process.compile_now()
    assert of_process.available() and of_process.compiled()


def test_a_thread_that_cannot_be_started_costs_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    of_process.register(lambda: None)
    monkeypatch.setattr(threading.Thread, "start", fail)
    assert not of_process.ready() and not of_process.available()


@pytest.mark.parametrize("loads", [False, True])
def test_a_process_that_is_forked_in_mid_loading_loads_nothing(
    monkeypatch: pytest.MonkeyPatch, loads: bool
) -> None:
    lock = threading.Lock()
    monkeypatch.setattr(of_process, "lock", lock)
    of_process.register(lambda: None)
    if loads:
        lock.acquire()
    of_process.forget_threads()  # which a fork calls
    of_process.wait_until_loaded(60)
    assert of_process.available() == of_process.compiled() == (not loads)


def test_without_numba_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    of_process.register(lambda: pytest.fail("there is nothing to compile with"))
    monkeypatch.setattr(compilation, "_is_installed", lambda: False)
    assert not of_process.ready() and not of_process.available()
    assert of_process.thread is None
    with pytest.raises(NumbaMissingError, match="is not installed"):
        of_process.check_available()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module; numba's own folders are below it."""
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setattr(jit, "_has_warned", False)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "users"))
    (tmp_path / "toy.py").write_text(TOY)
    return tmp_path


def toy(folder: Path) -> Any:
    """The module, as a new process finds it."""
    spec = importlib.util.spec_from_file_location("toy", folder / "toy.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def num_found(module: Any) -> int:
    """How often a compiled function was found on disk."""
    return sum(module.double.stats.cache_hits.values())


@pytest.mark.parametrize(("is_read_only", "kept"), [(False, "__pycache__"), (True, "users")])
def test_compiled_functions_are_kept_beside_the_module_or_for_the_user(
    folder: Path, is_read_only: bool, kept: str
) -> None:
    if is_read_only:
        (folder / "__pycache__").write_text("")  # can be no folder, whoever runs this
    assert toy(folder).double(3) == 8
    assert list((folder / kept).rglob("*.nbi"))
    again = toy(folder)
    assert again.double(3) == 8 and num_found(again) == 1


def test_where_nothing_can_be_written_they_are_compiled_anew(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "__pycache__").write_text("")
    (folder / "users").write_text("")
    for _ in range(2):
        module = toy(folder)
        assert module.double(3) == 8 and num_found(module) == 0
    (said,) = caplog.messages
    assert "NUMBA_CACHE_DIR" in said


def test_a_full_disk_costs_one_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(IndexDataCacheFile, "_save_data", fail)
        module = toy(folder)
        assert module.double(3) == 8 and module.double(0.5) == 3.0
    (said,) = caplog.messages
    assert "No space left on device" in said and "NUMBA_CACHE_DIR" in said
    assert toy(folder).double(3) == 8
    again = toy(folder)
    assert again.double(3) == 8 and num_found(again) == 1


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_damaged_files_are_written_anew(folder: Path, kind: str) -> None:
    toy(folder).double(3)
    for file in (folder / "__pycache__").glob(f"*.{kind}"):
        file.write_bytes(file.read_bytes()[:20] if kind == "nbc" else b"")
    module = toy(folder)
    assert module.double(3) == 8 and num_found(module) == 0
    again = toy(folder)
    assert again.double(3) == 8 and num_found(again) == 1


def test_a_kernel_is_compiled_again_if_a_file_beside_its_own_has_changed(folder: Path) -> None:
    (folder / "toy.py").write_text(TOY.replace("import jit", "import jit_numbers as jit"))
    beside = folder / "beside.py"
    for found, source in enumerate(("one = 1", "one = 1", "one = 22")):
        if not beside.exists() or beside.read_text() != source:
            beside.write_text(source)
        module = toy(folder)
        assert module.double(3) == 8 and num_found(module) == found % 2


@pytest.mark.parametrize("other", ["is forbidden", "fails", "compiles"])
def test_another_process_compiles_what_is_not_saved(
    folder: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    done: list[Any] = []
    module = toy(folder)

    class Child:
        def __init__(self, command: list[str], **_: Any) -> None:
            if other == "is forbidden":
                raise OSError("no more processes")
            compile(command[-1], "child", "exec")
            assert of_process.lock.locked()  # against a second process
            done.append("child")

        def poll(self) -> int:
            if other == "compiles":
                toy(folder).double(3)
            return 0

        def kill(self) -> None:
            pass

    monkeypatch.setattr(compilation.subprocess, "Popen", Child)
    of_process.register(lambda: done.append("first"))
    of_process.register(lambda: done.append(module.double(3)))
    for _ in range(2):
        of_process.wait_until_loaded(60)
    assert done == ["first", *([] if other == "is forbidden" else ["child"]), 8]
    assert of_process.ready() and num_found(module) == (other == "compiles")


WORK = """
import os
from pathlib import Path
from lookahead_hf.ngram_pool.compilation import of_process

def warm_up():
    get = getattr(os, "sched_getscheduler", lambda _: None)
    Path("compiled").write_text(str(get(0)))

of_process.register(warm_up)
"""


def pending(
    name: str, code: str, folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float = 250.0
) -> None:
    """Import a module that registers work; the other process runs idly for these seconds."""
    (folder / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(compilation, "IDLE_SECONDS", seconds)
    importlib.import_module(name)


def finished() -> int:
    """Compile in another process; return its exit status."""
    assert of_process.compile_elsewhere()
    assert of_process.child is not None
    return of_process.child.wait(300)


def test_the_other_process_imports_as_this_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "signal.py").write_text("raise SystemExit('this is not the standard library')")
    folder = tmp_path / """some "folder's" {name}"""
    folder.mkdir()
    pending("pending_work", WORK, folder, monkeypatch)
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # no import reads a Path
    monkeypatch.chdir(tmp_path)
    assert finished() == 0
    assert Path("compiled").read_text() == str(getattr(os, "SCHED_IDLE", None))


ABORTING = """
import os
from lookahead_hf.ngram_pool.compilation import of_process

of_process.register(os.abort)
"""


def test_what_ends_the_other_process_does_not_end_this_one(
    work: list[Callable[[], None]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LLVM does where it cannot lower an instruction."""
    pending("aborting_work", ABORTING, folder, monkeypatch)
    module = toy(folder)
    work[0] = lambda: module.double(3)
    work[0].__module__ = "aborting_work"
    assert finished() == -signal.SIGABRT
    of_process.wait_until_loaded(60)
    assert not of_process.ready() and not of_process.available()
    with pytest.raises(NumbaMissingError, match="signal 6 ended the process that compiled"):
        of_process.check_available()


STARVED = """
import os, time
from pathlib import Path
from lookahead_hf.ngram_pool.compilation import of_process

def warm_up():
    is_copy = os.getppid() != {parent}
    time.sleep(600 if is_copy else 0)
    Path("compiled").write_text(str(os.sched_getscheduler(0)))

of_process.register(warm_up)
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has an idle priority")
def test_a_process_that_gets_no_core_goes_on_at_normal_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pending("starved_work", STARVED.format(parent=os.getpid()), tmp_path, monkeypatch, 0.5)
    assert finished() == 0
    assert Path("compiled").read_text() == str(os.sched_getscheduler(0))


def test_steps_give_way_to_a_process_that_gets_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    moments: list[float] = []
    monkeypatch.setattr(compilation.time, "sleep", moments.append)
    monkeypatch.setattr(of_process, "thread", None)
    for ended, seconds, gives_way in [(None, 1, False), (None, 30, True), (0, 30, False)]:
        child = SimpleNamespace(poll=lambda ended=ended: ended)
        monkeypatch.setattr(of_process, "child", child)
        monkeypatch.setattr(of_process, "child_started", time.monotonic() - seconds)
        of_process.give_way()
        assert bool(moments) is gives_way
        moments.clear()


@pytest.mark.parametrize(("later", "ended"), [(119.0, []), (121.0, ["killed", 8])])
def test_after_two_minutes_the_process_is_ended_and_this_one_compiles(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    later: float,
    ended: list[Any],
) -> None:
    done: list[Any] = []
    child = SimpleNamespace(poll=lambda: None, kill=lambda: done.append("killed"))
    monkeypatch.setattr(of_process, "child", child)
    monkeypatch.setattr(of_process, "child_started", 1000.0)
    monkeypatch.setattr(compilation.time, "monotonic", lambda: 1000.0 + later)
    module = toy(folder)
    of_process.register(lambda: done.append(module.double(3)))
    of_process.ready()
    settle()
    assert done == ended
    assert of_process.compiled() is bool(ended)
