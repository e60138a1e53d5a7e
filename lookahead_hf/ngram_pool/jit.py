"""Marks loops that numba compiles, and keeps the compiled code on disk.

Only the process that runs `lookahead_hf.compile` compiles. In every other one a function is loaded
from disk, or calling it raises NotCompiledError.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numba
from numba import _dynfunc, njit, types
from numba.core import sigutils
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    IndexDataCacheFile,
    _CacheLocator,
)
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.cpu import CPUContext
from numba.core.registry import cpu_target
from numba.core.targetconfig import TargetConfig

from lookahead_hf.utils import cache_root

logger = logging.getLogger(__name__)

may_compile = False  # Whether this process compiles functions that are not on disk

_HERE = Path(__file__).resolve()


class NotCompiledError(RuntimeError):
    """A compiled function is not on disk."""


def jit(function: Callable[..., Any], error_model: str = "python") -> Any:
    """Compile a function that Python calls, without the interpreter lock."""
    _outer_names.add((function.__module__, function.__qualname__))
    options = {"nogil": True, "no_cfunc_wrapper": True, "error_model": error_model}
    return _kept(njit(**options)(function), function)


def jit_inner(function: Callable[..., Any], error_model: str = "python") -> Any:
    """Compile a function that only other compiled functions call, as a part of these.

    It needs no code of its own in the process that compiles.
    """
    if not _is_compiler:
        return _kept(njit(nogil=True, error_model=error_model)(function), function)
    wrappers = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    compiled = njit(nogil=True, error_model=error_model, **wrappers)(function)
    find = compiled.get_call_template
    # numba would compile a version of its own for each constant argument.
    compiled.get_call_template = lambda args, kws: find(tuple(map(types.unliteral, args)), kws)
    return compiled


jit_numbers = partial(jit, error_model="numpy")
"""Compile a function whose divisions by zero give infinity, as in vectors."""

jit_inner_numbers = partial(jit_inner, error_model="numpy")
"""Compile such a function as `jit_inner` does."""

_outer_names: set[tuple[str, str]] = set()
"""Modules and names of the functions that have code of their own."""

_is_compiler = False


class _InnerLibrary(JITCodeLibrary):
    """The code of an inner function, or of one of numba's own, such as `numpy.empty`.

    It is optimised and made native within its callers' only. numba would do so at every level: that
    takes half of the time.
    """

    def finalize(self) -> None:
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalize_dynamic_globals()
        self._finalized = True


def compile_here() -> None:
    """Let this process compile, before a module with such functions is imported."""
    global may_compile, _is_compiler
    may_compile = _is_compiler = True
    gc.disable()  # it finds next to nothing among numba's objects, for a tenth of the time
    # numba reads all options of its flags, thousands of times, to find what it keeps by them.
    TargetConfig.__hash__ = lambda flags: len(flags._values)
    TargetConfig.__eq__ = lambda flags, other: flags._values == getattr(other, "_values", None)
    JITCodeLibrary._optimize_functions = _set_layout
    executable = CPUContext.get_executable

    def get_executable(context: Any, library: Any, described: Any, environment: Any) -> Any:
        name = described.modname, described.qualname
        if name in _outer_names or type(library) is not JITCodeLibrary:
            return executable(context, library, described, environment)
        library.__class__ = _InnerLibrary
        library.finalize()
        module = described.lookup_module()
        return _dynfunc.make_function(module, name[1], "", 0, environment, (library,))

    CPUContext.get_executable = get_executable
    add = JITCodeLibrary.add_ir_module

    def add_ir_module(library: Any, module: Any) -> None:
        for function in module.functions:
            if function.blocks:
                set.add(function.attributes, _WIDEST)  # llvmlite knows no such attribute
        add(library, module)

    JITCodeLibrary.add_ir_module = add_ir_module


_WIDEST = '"prefer-vector-width"="512"'
"""Lets loops use the widest vectors, where LLVM would halve them for some of Intel's processors."""


def _set_layout(library: Any, module: Any) -> None:
    """Do no more for a single function: all of its callers' code is optimised at once."""
    module.data_layout = library._codegen._data_layout


class EntryPoint:
    """A function for C code, compiled or loaded when its address is first asked for."""

    def __init__(self, signature: Any, function: Callable[..., Any]) -> None:
        self._arguments: tuple[Any, ...] = function, sigutils.normalize_signature(signature), {}, {}

    @cached_property
    def address(self) -> int:
        compiled: Any = CFunc(*self._arguments)
        _kept(compiled, self._arguments[0]).compile()
        self._compiled = compiled  # which owns the code
        return int(compiled.address)


@cache
def prepare() -> None:
    """Let numba register what its functions are made of, which takes as long as loading ours."""
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


def folders() -> list[Path | None]:
    """Return where compiled code may be, in the order of preference; None is beside its source.

    Code that an installer has compiled there is read, whoever owns it. The last folder is for users
    who can write nowhere else.
    """
    given, last = numba.config.CACHE_DIR, _temporary()
    first: list[Path | None] = [Path(given)] if given else [None, cache_root() / "compiled"]
    return first + ([last] if _is_private(last) else [])


def folder_of(root: Path | None, source: Path | None = None) -> Path:
    """Return the folder of the code of a source file, by default this, below one of `folders`."""
    source = source or _HERE
    if root is None:
        return source.parent / "__pycache__"
    return root / _CacheLocator.get_suitable_cache_subpath(str(source))


@cache
def writable() -> Path | None:
    """Return the first folder in which this process can write; OSError if there is none."""
    errors = []
    with suppress(OSError):
        _temporary().mkdir(mode=0o700)
    for root in folders():
        try:
            folder = folder_of(root)
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            errors.append(error)
        else:
            return root
    raise OSError(
        f"compiled code cannot be kept ({errors[0]}): set NUMBA_CACHE_DIR to a folder that can be "
        "written"
    )


@cache
def key_of(name: str) -> str:
    """Return a file name for code that was compiled from these sources for this processor."""
    processor = cpu_target.target_context.codegen().magic_tuple()
    made_of = sys.version_info[:2], numba.__version__, processor, _sources()
    return f"{name}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.compiled"


@cache
def _sources() -> str:
    """Return a hash of the sources of compiled functions; times differ between copies."""
    digest = hashlib.sha256()
    with suppress(OSError):
        for file in sorted(each for name in _MADE_OF for each in _HERE.parents[1].glob(name)):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


_MADE_OF = (
    "drafting/**/*_numba.py",
    "engines/cpu/kernels/*.py",
    "ngram_pool/*_numba.py",
    "ngram_pool/jit.py",
    "ngram_pool/logits_memory.py",
    "ngram_pool/matches.py",
)


def _temporary() -> Path:
    """Return this user's folder for code that can be kept nowhere else."""
    user = f"-{os.getuid()}" if hasattr(os, "getuid") else ""
    return Path(tempfile.gettempdir(), f"lookahead_hf{user}")


def _is_private(folder: Path) -> bool:
    """Return whether a folder exists that no other user has made or can write into."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    is_own = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    return stat.S_ISDIR(found.st_mode) and is_own and not found.st_mode & 0o022


def _kept(compiled: Any, function: Callable[..., Any]) -> Any:
    """Give a numba function our cache, as `cache=True` gives it numba's own."""
    compiled._cache = _Cache(function)
    return compiled


class _Locator(_CacheLocator):
    """Finds the folder for the code of a source file."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self.source, self._line = Path(file).resolve(), function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> _Locator:
        return cls(function, file)

    def get_cache_path(self) -> str:
        return str(folder_of(writable() if may_compile else None, self.source))

    def get_source_stamp(self) -> str:
        return _sources()

    def get_disambiguator(self) -> str:
        return str(self._line)


class _Implementation(CompileResultCacheImpl):
    _locator_classes = (_Locator,)


class _Cache(FunctionCache):
    """numba's cache, read in all folders and saved in one, where damage is written anew."""

    _impl_class = _Implementation

    def _file(self, root: Path | None) -> Any:
        return IndexDataCacheFile(
            cache_path=str(folder_of(root, self._impl.locator.source)),
            filename_base=self._impl.filename_base,
            source_stamp=_sources(),
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        key = self._index_key(sig, target_context.codegen())
        for root in folders():
            file = self._file(root)
            try:
                data = file.load(key)
                if data is not None:
                    return self._impl.rebuild(target_context, data)
            except Exception as error:
                logger.info("a compiled function cannot be read: %r", error)
                if may_compile:
                    with suppress(Exception):
                        file.flush()  # every save would read a damaged index again
        if not may_compile:
            raise NotCompiledError(
                f"{self._py_func.__qualname__} is not compiled for {sig}: `lookahead-hf compile` "
                "compiles what is missing"
            )
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        self._cache_file = self._file(writable())
        super().save_overload(sig, data)
