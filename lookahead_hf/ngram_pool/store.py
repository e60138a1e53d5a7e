"""Contents of a pool, and its file: safetensors, opened by memory map, replaced as a whole.

Tensors: `table` U32 [buckets, 16], `links` U32 [tokens, 4] and `log` I32 [tokens], as described in
`_pool_table`. `__metadata__` holds the numbers of `Contents` and a SHA-256 of everything, as text.

A process that has a file open keeps its contents when the file is replaced, but not when the file
is written into. If it was cut short, the system even ends a process that reads on (SIGBUS), so
every reader asks `OpenFile` first.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lookahead_hf.ngram_pool.matches import NUM_KEYS
from lookahead_hf.utils import replacing

FORMAT = "lookahead_hf.ngram_pool"
VERSION = 1

MOST_TOKENS = 2**27
"""Largest pool: an entry of the table keeps 3 bits of the key's hash beside the time."""

WAYS = 16
"""Entries of one bucket of the table: a cache line."""

FEWEST_BUCKETS = 256
"""A power of two."""

ROOM_TO_GROW = 6
"""Entries per token that a growing table has room for. Natural text needs 1 to 2 of 4 possible
ones, but a bucket that is not split yet is twice as full as the others."""

ROOM_AT_MOST = 4.5
"""Entries per token of a full pool that the largest table has room for. Its number of buckets is a
power of two, so the actual room may be half of that."""

MOST_VOCABULARY = 2**31 - 1

_DTYPES = {"table": ("U32", np.uint32), "links": ("U32", np.uint32), "log": ("I32", np.int32)}
_MOST_HEADER = 1 << 16
# The data begin at a multiple of it, so that no bucket spans two cache lines.
_ALIGNMENT = 64


class OpenFile:
    """A mapped file that detects whether it was written into since it was opened."""

    def __init__(self, path: str | os.PathLike[str], file: BinaryIO) -> None:
        self._path, self._number = os.fspath(path), os.dup(file.fileno())
        weakref.finalize(self, os.close, self._number)
        self._state = self._look()

    def check(self) -> None:
        if self._look() != self._state:
            raise ValueError(
                f"{self._path}: the file was written into while it was open, so this pool can no "
                "longer be read: load the pool again, and replace such a file as a whole, as "
                "`NgramPool.save` does"
            )

    def _look(self) -> tuple[int, int]:
        now = os.fstat(self._number)
        return now.st_size, now.st_mtime_ns


@dataclass(eq=False)
class Contents:
    """The arrays of a pool, at least as large as `shapes` says, and the numbers of its file."""

    max_tokens: int
    num_added: int = 0  # tokens and borders that were ever added
    num_texts: int = 0  # borders in the log
    vocab_size: int | None = None
    tokenizer_fingerprint: str | None = None
    file: OpenFile | None = None  # that the arrays are mapped from, None if they are in memory
    log: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    links: np.ndarray = field(default_factory=lambda: np.empty((0, NUM_KEYS), np.uint32))
    table: np.ndarray = field(default_factory=lambda: np.zeros((FEWEST_BUCKETS, WAYS), np.uint32))

    @property
    def live(self) -> int:
        """Places of the log that are filled."""
        return min(self.num_added, self.max_tokens)

    @property
    def num_buckets(self) -> int:
        wanted = max(FEWEST_BUCKETS, ROOM_TO_GROW * self.live // WAYS)
        largest = max(FEWEST_BUCKETS, int(ROOM_AT_MOST * self.max_tokens / WAYS))
        return min(wanted, 1 << largest.bit_length() - 1)

    @property
    def time_bits(self) -> int:
        """Bits of an arrival time; it recurs only long after its token has left the log."""
        return max(16, (2 * self.max_tokens).bit_length())

    def later(self, num_tokens: int) -> Contents:
        """Return a copy whose numbers count `num_tokens` more; the arrays are the same."""
        return replace(self, num_added=self.num_added + num_tokens)

    def make_room(self, num_tokens: int) -> None:
        after = self.later(num_tokens)
        # Room for twice as many, so that the arrays are seldom copied.
        ahead = after.later(after.num_added)
        if after.live > len(self.log):
            self.log = enlarged(self.log, ahead.live)
            self.links = enlarged(self.links, ahead.live)
        if after.num_buckets > len(self.table):
            self.table = enlarged(self.table, ahead.num_buckets)

    def check_file(self) -> None:
        if self.file is not None:
            self.file.check()

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the filled part of the arrays, in the order of the file."""
        self.check_file()
        return {name: getattr(self, name)[: shape[0]] for name, shape in self.shapes().items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of the filled part of each array, in the order of the file."""
        table, links, log = (self.num_buckets, WAYS), (self.live, NUM_KEYS), (self.live,)
        return {"table": table, "links": links, "log": log}

    def layout(self) -> dict[str, Any]:
        """Return type, shape and place of each array, as the file's header states them."""
        layout, start = {}, 0
        for name, shape in self.shapes().items():
            dtype, kind = _DTYPES[name]
            end = start + math.prod(shape) * np.dtype(kind).itemsize
            layout[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
            start = end
        return layout

    def numbers(self) -> dict[str, str]:
        names = ("max_tokens", "num_added", "num_texts", "vocab_size", "tokenizer_fingerprint")
        values = {name: getattr(self, name) for name in names}
        return {name: str(value) for name, value in values.items() if value is not None}

    def digest(self) -> str:
        """Return the SHA-256 of the numbers and the arrays, in hexadecimal."""
        digest = hashlib.sha256(json.dumps(self.numbers(), sort_keys=True).encode())
        for array in self.arrays().values():
            digest.update(_bytes(array))
        return digest.hexdigest()


def write(path: str | os.PathLike[str], contents: Contents) -> None:
    """Write or replace a file: a reader finds the whole old file or the whole new one."""
    metadata = {"format": FORMAT, "version": str(VERSION), "sha256": contents.digest()}
    fields = {"__metadata__": {**metadata, **contents.numbers()}, **contents.layout()}
    header = json.dumps(fields).encode()
    header += b" " * (-(len(header) + 8) % _ALIGNMENT)
    with replacing(Path(path)) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for array in contents.arrays().values():
            file.write(_bytes(array))


def read(path: str | os.PathLike[str], verifies: bool = False) -> Contents:
    """Open a file by memory map; changes to the arrays stay in this process.

    The header is always checked; `verifies` reads all data and compares their checksum.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not the file of a pool, or is damaged.
    """
    with open(os.fspath(path), "rb") as file:  # open alone would take an int, as a descriptor
        opened = OpenFile(path, file)
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER):
            raise _not_a_pool(path)
        metadata, tensors = _parsed(path, file.read(length))
        try:
            contents, digest = _contents(metadata, opened), str(metadata["sha256"])
            layout = contents.layout()
            if tensors != layout:
                raise ValueError("its arrays do not have the sizes that its numbers imply")
            if size != (expected := 8 + length + layout["log"]["data_offsets"][1]):
                raise ValueError(f"it should have {expected} bytes, but has {size}")
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise _damaged(path, str(error)) from error
        # A private map: the arrays can be written to, and the file never is.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for name, shape in contents.shapes().items():
        offset = 8 + length + layout[name]["data_offsets"][0]
        array = np.frombuffer(data, _DTYPES[name][1], math.prod(shape), offset)
        setattr(contents, name, array.reshape(shape))
    if verifies and contents.digest() != digest:
        raise _damaged(path, "its checksum does not match")
    return contents


def _parsed(path: str | os.PathLike[str], header: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    try:
        tensors = json.loads(header)
        metadata = tensors.pop("__metadata__")
        is_pool = metadata["format"] == FORMAT
        version = int(metadata["version"]) if is_pool else VERSION
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
        raise _not_a_pool(path) from None
    if not is_pool:
        raise _not_a_pool(path)
    if version != VERSION:
        raise ValueError(
            f"{os.fspath(path)}: the pool has format version {version}, but this lookahead_hf "
            f"reads version {VERSION}: build the pool again, or install the version that wrote it"
        )
    return metadata, tensors


def _contents(metadata: dict[str, str], file: OpenFile) -> Contents:
    """Return contents with the numbers of the metadata, which are checked, and without arrays."""
    vocab_size, fingerprint = metadata.get("vocab_size"), metadata.get("tokenizer_fingerprint")
    contents = Contents(
        max_tokens=int(metadata["max_tokens"]),
        num_added=int(metadata["num_added"]),
        num_texts=int(metadata["num_texts"]),
        vocab_size=None if vocab_size is None else int(vocab_size),
        tokenizer_fingerprint=None if fingerprint is None else str(fingerprint),
        file=file,
    )
    if not (1 <= contents.max_tokens <= MOST_TOKENS and 0 <= contents.num_added < 2**62):
        raise ValueError("its number of tokens is out of range")
    if vocab_size is not None and not 1 <= int(vocab_size) <= MOST_VOCABULARY:
        raise ValueError("its vocabulary size is out of range")
    if not 0 <= contents.num_texts <= contents.live:
        raise ValueError("its number of texts is out of range")
    return contents


def enlarged(array: np.ndarray, length: int) -> np.ndarray:
    """Return a copy with room for `length` entries; the new ones are not set."""
    larger = np.empty((length, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _not_a_pool(path: str | os.PathLike[str]) -> ValueError:
    return ValueError(
        f"{os.fspath(path)} is not a pool, or a damaged one: make one with `lookahead-hf pool "
        "build` or `NgramPool.save`"
    )


def _damaged(path: str | os.PathLike[str], reason: str) -> ValueError:
    return ValueError(
        f"{os.fspath(path)}: the pool is damaged ({reason}): restore the file, or build it again"
    )
