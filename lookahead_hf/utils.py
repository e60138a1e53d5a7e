"""Small helpers that know nothing of models: files, names, warnings, wrappers."""

from __future__ import annotations

import functools
import glob
import inspect
import os
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, TypeVar

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

YOUNG_SECONDS = 60
"""Age below which a part of a file is kept."""


def cache_root() -> Path:
    """Return the folder of everything that is kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "lookahead_hf"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file in the same folder, which replaces `path` once it is on the disk.

    Parts that killed writers have left behind are removed.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        _remove_if_left(left)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            _lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock of a file, and hold it; where there are no locks, go on without it."""
    with path.open("ab") as file:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock(file: BinaryIO) -> bool:
    """Lock a file as long as this process has it open; return False if another one has it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_if_left(part: Path) -> None:
    """Remove a part of a file if its writer is gone and it is therefore unlocked.

    A part younger than a minute stays: its writer may not have locked it yet, or its file system
    may have no locks.
    """
    with suppress(OSError):
        if time.time() - part.stat().st_mtime < YOUNG_SECONDS:
            return
        with part.open("rb") as file:
            if _lock(file):
                part.unlink()


_Function = TypeVar("_Function", bound=Callable[..., Any])

LIKENESS = 0.7
"""How similar a name must be to a known one to count as misspelt, from 0 to 1, as in `difflib`."""


def nearest(name: Any, known: Iterable[Any]) -> str | None:
    """Return the known name most similar to a given one, None if none is similar."""
    import difflib  # only needed for errors

    names = [each for each in known if isinstance(each, str)]
    return next(iter(difflib.get_close_matches(str(name).lower(), names, 1, LIKENESS)), None)


def known_names(name: Any, known: Iterable[Any]) -> str:
    """Return the end of an error about an unknown name: a suggestion, and all known names."""
    known = list(known)
    meant = nearest(name, known)
    hint = "" if meant is None else f"did you mean {meant!r}? "
    return f"{hint}known: {', '.join(map(str, known))}"


def check_names(
    title: str, given: Iterable[Any], known: Iterable[str], kind: type[Exception] = TypeError
) -> None:
    """Raise an error of a kind, with a suggestion, if `title` has no argument of a given name."""
    known = [*known]
    for name in given:
        if name not in known:
            raise kind(f"{title} has no argument {name!r}; {known_names(name, known)}")


def spelt_right(function: _Function) -> _Function:
    """Let a function suggest the right name if it gets an unknown argument (TypeError)."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    title = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_names(title, kwargs, names)
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


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
        raise _not_a_model(model)
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


def _not_a_model(model: Any) -> ValueError:
    if model is None:
        return ValueError(
            "expected a model, got None; enable_everywhere() enables every model of the process"
        )
    if isinstance(model, type):
        return ValueError(
            f"{model.__name__} is a class: pass a model object, derive a class of your own from "
            "SpeculativeMixin and it, or use enable_everywhere()"
        )
    if isinstance(model, str):
        return ValueError(
            f"{model!r} is a name, not a model: load the model first, as in "
            f"model = AutoModelForCausalLM.from_pretrained({model!r})"
        )
    return ValueError(
        f"{type(model).__name__} is not a transformers model that can generate (no "
        "GenerationMixin), and does not contain one"
    )
