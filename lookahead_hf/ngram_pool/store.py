"""The file of a pool: a safetensors file, opened by memory map, replaced in one piece.

Tensors: `table` U32 [buckets, 16], `links` U32 [tokens, 4] and `log` I32 [tokens], as described in
`_pool_table`. The numbers of `Contents` and a SHA-256 of everything stand in `__metadata__`, as
decimal or hexadecimal text.

A file that is replaced stays as it was for those who have it open. One that is written into does
not, and where it has become shorter the system ends a process that reads on (SIGBUS): so whoever
reads asks `OpenFile` first.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import secrets
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lookahead_hf.ngram_pool.suffix_index import NUM_KEYS

FORMAT = "lookahead_hf.ngram_pool"
VERSION = 1

MOST_TOKENS = 2**27
"""Largest pool: an entry of the table keeps 3 bits of the key's hash beside the time."""

WAYS = 16
"""Entries of one bucket of the table: a cache line."""

FEWEST_BUCKETS = 256
"""A power of two."""

ROOM_TO_GROW = 6
"""Entries per token that a growing table has room for.

Natural text needs 1 to 2, of 4 that are possible, but a bucket that is not split yet is twice as
full as the others.
"""

ROOM_AT_MOST = 4.5
"""Entries per token of a full pool that the largest table has room for; it is a power of two, so
for half of that at least."""

MOST_VOCABULARY = 2**31 - 1

_DTYPES = {"table": ("U32", np.uint32), "links": ("U32", np.uint32), "log": ("I32", np.int32)}
_MOST_HEADER = 1 << 16
# The data begin at a multiple of it, so that no bucket lies across two cache lines.
_ALIGNMENT = 64


class OpenFile:
    """A file that is mapped: whether what is there is still what was opened."""

    def __init__(self, path: str | os.PathLike[str], file: BinaryIO) -> None:
        self._path, self._number = os.fspath(path), os.dup(file.fileno())
        weakref.finalize(self, os.close, self._number)
        self._state = self._look()

    def check(self) -> None:
        """Raise ValueError where the file was written into."""
        if self._look() != self._state:
            raise ValueError(
                f"{self._path}: the file was written into while it was open, so that its pool can "
                "no longer be read: replace such a file as a whole, as `NgramPool.save` does"
            )

    def _look(self) -> tuple[int, int]:
        now = os.fstat(self._number)
        return now.st_size, now.st_mtime_ns


@dataclass(eq=False)
class Contents:
    """What a pool holds and what its file keeps.

    Attributes:
        log: Tokens by place, at least [live] int32.
        links: Distances to the next older occurrences, at least [live, NUM_KEYS] uint32.
        table: Newest occurrences by hash, at least [num_buckets, WAYS] uint32.
        max_tokens: Places of a full log.
        num_added: Tokens and borders that were ever added.
        num_texts: Borders in the log.
        vocab_size: Token ids are below; None: not said.
        tokenizer_fingerprint: What tells the tokenizer from others; None: not said.
        file: The file that the arrays lie in; None where they lie in memory.
    """

    log: np.ndarray
    links: np.ndarray
    table: np.ndarray
    max_tokens: int
    num_added: int
    num_texts: int
    vocab_size: int | None
    tokenizer_fingerprint: str | None
    file: OpenFile | None = None

    @property
    def live(self) -> int:
        """Places of the log that are filled."""
        return min(self.num_added, self.max_tokens)

    @property
    def num_buckets(self) -> int:
        """Buckets of the table that are in use."""
        wanted = max(FEWEST_BUCKETS, ROOM_TO_GROW * self.live // WAYS)
        largest = max(FEWEST_BUCKETS, int(ROOM_AT_MOST * self.max_tokens / WAYS))
        return min(wanted, 1 << largest.bit_length() - 1)

    @property
    def time_bits(self) -> int:
        """Bits of an arrival time; it comes round again when its token is long gone."""
        return max(16, (2 * self.max_tokens).bit_length())

    def check_file(self) -> None:
        """Raise ValueError where the arrays lie in a file that was written into."""
        if self.file is not None:
            self.file.check()

    def arrays(self) -> dict[str, np.ndarray]:
        """The filled part of the arrays, in the order of the file."""
        self.check_file()
        live, buckets = self.live, self.num_buckets
        return {"table": self.table[:buckets], "links": self.links[:live], "log": self.log[:live]}

    def numbers(self) -> dict[str, str]:
        """Everything but the arrays, as text."""
        fields = {
            "max_tokens": self.max_tokens,
            "num_added": self.num_added,
            "num_texts": self.num_texts,
            "vocab_size": self.vocab_size,
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
        }
        return {name: str(value) for name, value in fields.items() if value is not None}

    def digest(self) -> str:
        """SHA-256 of the numbers and the arrays, in hexadecimal."""
        digest = hashlib.sha256(json.dumps(self.numbers(), sort_keys=True).encode())
        for array in self.arrays().values():
            digest.update(_bytes(array))
        return digest.hexdigest()


def write(path: str | os.PathLike[str], contents: Contents) -> None:
    """Write a file, or replace it: whoever opens it finds the old one or the new one, whole."""
    header = _header(contents)
    with _replacing(Path(path)) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for array in contents.arrays().values():
            file.write(_bytes(array))


def read(path: str | os.PathLike[str]) -> Contents:
    """Open a file by memory map; changes to the arrays stay in this process.

    Sizes and numbers are checked, the data are not looked at.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no file of a pool, or is damaged.
    """
    contents, _ = _open(path)
    return contents


def check(path: str | os.PathLike[str]) -> Contents:
    """Open a file like `read`, and read it all.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no file of a pool, or a bit of it has changed since it was written.
    """
    contents, digest = _open(path)
    if contents.digest() != digest:
        raise _damaged(path, "its checksum is another one")
    return contents


def _header(contents: Contents) -> bytes:
    tensors: dict[str, Any] = {}
    start = 0
    for name, array in contents.arrays().items():
        end = start + array.nbytes
        tensors[name] = {
            "dtype": _DTYPES[name][0],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
        start = end
    metadata = {"format": FORMAT, "version": str(VERSION), "sha256": contents.digest()}
    header = json.dumps({"__metadata__": {**metadata, **contents.numbers()}, **tensors}).encode()
    return header + b" " * (-(len(header) + 8) % _ALIGNMENT)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file in the same folder that takes the place of `path` once it is on the disk."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink()


def _open(path: str | os.PathLike[str]) -> tuple[Contents, str]:
    """The contents and the digest that the file says they have."""
    with open(os.fspath(path), "rb") as file:  # open alone would take an int, as a descriptor
        opened = OpenFile(path, file)
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER):
            raise _no_pool(path)
        metadata, tensors = _parsed(path, file.read(length))
        _check_layout(path, tensors, size - 8 - length)
        # A private map: the arrays can be written to, and the file never is.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    try:
        arrays = {name: _array(data, 8 + length, name, tensors[name]) for name in _DTYPES}
        contents = _contents(metadata, arrays, opened)
        return contents, str(metadata["sha256"])
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise _damaged(path, str(error)) from error


def _parsed(path: str | os.PathLike[str], header: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """The metadata and the tensors of a header."""
    try:
        tensors = json.loads(header)
        metadata = tensors.pop("__metadata__")
        is_pool = metadata["format"] == FORMAT
        version = int(metadata["version"]) if is_pool else VERSION
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
        raise _no_pool(path) from None
    if not is_pool:
        raise _no_pool(path)
    if version != VERSION:
        raise ValueError(
            f"{os.fspath(path)}: a pool of format version {version}, and version {VERSION} is what "
            "this lookahead_hf reads: build the pool again, or install the version that wrote it"
        )
    return metadata, tensors


def _check_layout(path: str | os.PathLike[str], tensors: dict[str, Any], num_bytes: int) -> None:
    """Raise ValueError unless the tensors are those of a pool and fill the file exactly."""
    try:
        end = 0
        for name, (dtype, kind) in _DTYPES.items():
            tensor = tensors[name]
            size = int(np.prod(tensor["shape"], dtype=object)) * np.dtype(kind).itemsize
            if tensor["dtype"] != dtype or tensor["data_offsets"] != [end, end + size]:
                raise ValueError(f"the tensor {name!r} has another type or place")
            end += size
        if end != num_bytes or len(tensors) != len(_DTYPES):
            raise ValueError(f"{end} bytes of data are expected, {num_bytes} are there")
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise _damaged(path, str(error)) from error


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _array(data: mmap.mmap, start: int, name: str, tensor: dict[str, Any]) -> np.ndarray:
    shape = tuple(tensor["shape"])
    offset = start + tensor["data_offsets"][0]
    count = int(np.prod(shape))
    return np.frombuffer(data, _DTYPES[name][1], count, offset).reshape(shape)


def _contents(metadata: dict[str, str], arrays: dict[str, np.ndarray], file: OpenFile) -> Contents:
    """Contents whose numbers fit the arrays; ValueError where they do not."""
    vocab_size, fingerprint = metadata.get("vocab_size"), metadata.get("tokenizer_fingerprint")
    contents = Contents(
        log=arrays["log"],
        links=arrays["links"],
        table=arrays["table"],
        max_tokens=int(metadata["max_tokens"]),
        num_added=int(metadata["num_added"]),
        num_texts=int(metadata["num_texts"]),
        vocab_size=None if vocab_size is None else int(vocab_size),
        tokenizer_fingerprint=None if fingerprint is None else str(fingerprint),
        file=file,
    )
    live = contents.live
    if not (1 <= contents.max_tokens <= MOST_TOKENS and 0 <= contents.num_added < 2**62):
        raise ValueError("a number is out of its range")
    if vocab_size is not None and not 1 <= int(vocab_size) <= MOST_VOCABULARY:
        raise ValueError("the vocabulary size is out of its range")
    if arrays["log"].shape != (live,) or arrays["links"].shape != (live, NUM_KEYS):
        raise ValueError("the numbers do not fit the log")
    if arrays["table"].shape != (contents.num_buckets, WAYS):
        raise ValueError("the numbers do not fit the table")
    if not 0 <= contents.num_texts <= live:
        raise ValueError("the number of texts does not fit the log")
    return contents


def _no_pool(path: str | os.PathLike[str]) -> ValueError:
    return ValueError(
        f"{os.fspath(path)} is no pool, or a damaged one: make one with `lookahead-hf pool build` "
        "or `NgramPool.save`"
    )


def _damaged(path: str | os.PathLike[str], reason: str) -> ValueError:
    return ValueError(
        f"{os.fspath(path)}: the pool is damaged ({reason}): restore the file, or build it again"
    )
