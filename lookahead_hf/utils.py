"""Small helpers that know nothing of models: files, names, warnings, wrappers."""

from __future__ import annotations

import os
import secrets
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def cache_root() -> Path:
    """Return the folder of everything that is kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "lookahead_hf"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file in the same folder, which replaces `path` once it is on the disk."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock of a file, and hold it; where there are no locks, go on without it."""
    with path.open("ab") as file:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def known_names(known: Iterable[Any]) -> str:
    """Return the end of an error about an unknown name."""
    return f"known: {', '.join(map(str, known))}"


_LIBRARIES = ("lookahead_hf", "transformers", "torch")


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line of the nearest caller that belongs to none of these libraries."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


MOST_WRAPPERS = 16
"""Most nested wrappers that are unwrapped; a mock would contain wrappers without end."""


def unwrap(model: Any) -> Any:
    """Return the transformers model inside wrappers; ValueError if there is none."""
    from transformers import GenerationMixin  # so that statistics can be read without torch

    inner = model
    for _ in range(MOST_WRAPPERS):
        if inner is None or isinstance(inner, GenerationMixin):
            break
        inner = _inside(inner)
    if not isinstance(inner, GenerationMixin):
        raise ValueError(
            f"expected a model that was loaded, as by AutoModelForCausalLM.from_pretrained, not "
            f"{model!r:.80}: it is no transformers model that can generate (no GenerationMixin), "
            "and contains none"
        )
    return inner


def _inside(wrapper: Any) -> Any:
    """Return the next object inside a wrapper, None for an unknown wrapper."""
    from torch import nn

    if isinstance(wrapper, type):
        return None
    if callable(base := getattr(wrapper, "get_base_model", None)):
        return base()  # PEFT
    # torch.compile; DistributedDataParallel and FSDP; quantisers' wrappers and pipelines.
    for name in ("_orig_mod", "module", "model"):
        inner = getattr(wrapper, name, None)
        if isinstance(inner, nn.Module) and inner is not wrapper:
            return inner
    return None
