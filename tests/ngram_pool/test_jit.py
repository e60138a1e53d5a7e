"""What of numba's functions is kept on disk, and where; and that only one process compiles."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from numba.core import config

from lookahead_hf.ngram_pool import jit

TOY = """
from lookahead_hf.ngram_pool.jit import jit, jit_inner

@jit_inner
def inner(x):
    return x + 1

@jit
def double(x):
    return 2 * inner(x) + inner(-1)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module; our own folders are below it. This process may compile."""
    tmp_path = tmp_path / "ngram_pool"
    tmp_path.mkdir()
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setattr(jit, "may_compile", True)
    monkeypatch.setattr(jit, "_HERE", tmp_path / "toy.py")
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "users"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(jit.tempfile, "tempdir", str(temporary))
    (tmp_path / "toy.py").write_text(TOY)
    yield tmp_path
    jit.writable.cache_clear()
    jit._sources.cache_clear()


def toy(folder: Path) -> Any:
    """The module, as a new process finds it."""
    jit.writable.cache_clear()
    jit._sources.cache_clear()
    spec = importlib.util.spec_from_file_location("toy", folder / "toy.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def num_found(module: Any) -> int:
    """How often a compiled function was found on disk."""
    return sum(module.double.stats.cache_hits.values())


@pytest.mark.parametrize(
    ("read_only", "kept"),
    [
        ([], "__pycache__"),
        (["__pycache__"], "users/lookahead_hf"),
        (["__pycache__", "users"], "temporary"),
    ],
)
def test_code_is_kept_beside_the_module_or_for_the_user(
    folder: Path, read_only: list[str], kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in read_only:
        (folder / name).write_text("")  # can be no folder, whoever runs this
    assert toy(folder).double(3) == 8
    assert list((folder / kept).rglob("*.nbi"))
    monkeypatch.setattr(jit, "may_compile", False)
    again = toy(folder)
    assert again.double(3) == 8 and num_found(again) == 1


def test_code_that_an_installer_has_compiled_is_read_by_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy(folder).double(3)
    for file in folder.glob("__pycache__/*"):
        os.utime(file, (1, 1))  # as in a copy of an image
    os.utime(folder / "toy.py", (1, 1))
    monkeypatch.setattr(jit, "writable", lambda: pytest.fail("nothing is written"))
    monkeypatch.setattr(jit.writable, "cache_clear", lambda: None, raising=False)
    monkeypatch.setattr(jit, "may_compile", False)
    again = toy(folder)
    assert again.double(3) == 8 and num_found(again) == 1


def test_a_process_that_serves_calls_compiles_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "may_compile", False)
    module = toy(folder)
    for function in (module.double, module.inner):
        with pytest.raises(jit.NotCompiledError, match="`lookahead-hf compile`"):
            function(3)
    assert not list(folder.rglob("*.nbi"))


@pytest.mark.parametrize("kind", ["a link", "open to all", "a file"])
def test_a_temporary_folder_that_others_could_fill_is_not_read(folder: Path, kind: str) -> None:
    for name in ("__pycache__", "users"):
        (folder / name).write_text("")
    place = jit._temporary()
    if kind == "a link":
        (folder / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(folder / "elsewhere")
    elif kind == "a file":
        place.write_text("")
    else:
        place.mkdir()
        place.chmod(0o777)
    assert place not in jit.folders()
    with pytest.raises(OSError, match="NUMBA_CACHE_DIR"):
        jit.writable()


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_damaged_files_are_written_anew(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy(folder).double(3)
    for file in (folder / "__pycache__").glob(f"*.{kind}"):
        file.write_bytes(file.read_bytes()[:20] if kind == "nbc" else b"")
    with monkeypatch.context() as patched, pytest.raises(jit.NotCompiledError):
        patched.setattr(jit, "may_compile", False)
        toy(folder).double(3)
    module = toy(folder)
    assert module.double(3) == 8 and num_found(module) == 0
    again = toy(folder)
    assert again.double(3) == 8 and num_found(again) == 1


def test_a_function_is_compiled_again_if_another_file_of_them_has_changed(folder: Path) -> None:
    (folder.parent / "drafting").mkdir()
    beside = folder.parent / "drafting" / "beside_numba.py"
    for found, source in enumerate(("one = 1", "one = 1", "one = 22")):
        beside.write_text(source)
        module = toy(folder)
        assert module.double(3) == 8 and num_found(module) == found % 2


def test_every_file_of_compiled_functions_counts() -> None:
    package, uses = Path(jit.__file__).parents[1], "from lookahead_hf.ngram_pool.jit import"
    found = [{*package.glob(name)} for name in jit._MADE_OF]
    compiled = {file for file in package.rglob("*.py") if uses in file.read_text("utf-8")}
    assert all(found) and compiled <= set().union(*found)


COMPILING = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from lookahead_hf.ngram_pool import jit
jit.compile_here()
jit._HERE = Path(sys.argv[1], "toy.py")
import toy
assert toy.double(3) == 8 and toy.double(0.5) == 3.0
print(len(toy.inner.overloads), type(next(iter(toy.inner.overloads.values())).library).__name__)
print(*['"prefer-vector-width"="512"' in code for code in toy.double.inspect_llvm().values()])
"""


def test_inner_functions_are_parts_of_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where they are compiled: without code of their own, in the widest vectors."""
    command = [sys.executable, "-c", COMPILING, str(folder)]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder / "kept")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "_InnerLibrary", "True", "True"]
    names = [file.name for file in (folder / "kept").rglob("*.nbi")]
    assert len(names) == 1 and names[0].startswith("toy.double")
    monkeypatch.setattr(config, "CACHE_DIR", str(folder / "kept"))
    monkeypatch.setattr(jit, "may_compile", False)
    monkeypatch.syspath_prepend(folder)
    module = toy(folder)
    assert module.double(3) == 8 and module.double(0.5) == 3.0
