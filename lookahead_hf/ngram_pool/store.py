"""The file of a pool: safetensors, opened by memory map, replaced as a whole.

Its tensors are the arrays of a suffix index as in `_numba`, all I32: `text` [tokens], `links`
[tokens, 4] and `heads` [slots]. `__metadata__` holds the numbers of `Contents` and a SHA-256 of
everything, as text.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lookahead_hf.ngram_pool.matches import BORDER, NUM_KEYS
from lookahead_hf.ngram_pool.suffix_index import Arrays
from lookahead_hf.utils import replacing

FORMAT = "lookahead_hf.ngram_pool"
VERSION = 2

MOST_TOKENS = 2**29
"""Largest pool: an int32 entry of `heads` keeps a place and the number of a key."""

MOST_VOCABULARY = 2**31 - 1

_MOST_HEADER = 1 << 16
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


@dataclass(frozen=True, eq=False)
class Contents:
    """What the file of a pool holds."""

    max_tokens: int
    vocab_size: int | None
    tokenizer_fingerprint: str | None
    arrays: Arrays
    file: OpenFile | None = None  # that the arrays are mapped from

    def numbers(self) -> dict[str, str]:
        text, _, heads = self.arrays
        values = {
            "max_tokens": self.max_tokens,
            "num_tokens": len(text),
            "num_slots": len(heads),
            "vocab_size": self.vocab_size,
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    def digest(self) -> str:
        """Return the SHA-256 of the numbers and the arrays, in hexadecimal."""
        digest = hashlib.sha256(json.dumps(self.numbers(), sort_keys=True).encode())
        for array in self.arrays:
            digest.update(_bytes(array))
        return digest.hexdigest()


def write(path: str | os.PathLike[str], contents: Contents) -> None:
    """Write or replace a file: a reader finds the whole old file or the whole new one."""
    metadata = {"format": FORMAT, "version": str(VERSION), "sha256": contents.digest()}
    text, _, heads = contents.arrays
    layout = _layout(len(text), len(heads))
    header = json.dumps({"__metadata__": {**metadata, **contents.numbers()}, **layout}).encode()
    header += b" " * (-(len(header) + 8) % _ALIGNMENT)
    with replacing(Path(path)) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for array in contents.arrays:
            file.write(_bytes(array))


def read(path: str | os.PathLike[str], verifies: bool = False) -> Contents:
    """Open a file by memory map; changes to the arrays stay in this process.

    `verifies` also compares the checksum of all data.

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
            layout = _layout(int(metadata["num_tokens"]), int(metadata["num_slots"]))
            if tensors != layout:
                raise ValueError("its arrays do not have the sizes that its numbers imply")
            if size != (expected := 8 + length + layout["heads"]["data_offsets"][1]):
                raise ValueError(f"it should have {expected} bytes, but has {size}")
            # A private map: the arrays can be written to, and the file never is.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            contents = _contents(metadata, _arrays(data, 8 + length, layout), opened)
            if verifies and contents.digest() != metadata["sha256"]:
                raise ValueError("its checksum does not match")
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(
                f"{os.fspath(path)}: the pool is damaged ({error}): restore the file, or build it "
                "again"
            ) from error
    return contents


def _layout(num_tokens: int, num_slots: int) -> dict[str, Any]:
    """Return type, shape and place of each array, as the file's header states them."""
    layout, start = {}, 0
    shapes = {"text": [num_tokens], "links": [num_tokens, NUM_KEYS], "heads": [num_slots]}
    for name, shape in shapes.items():
        end = start + math.prod(shape) * 4
        layout[name] = {"dtype": "I32", "shape": shape, "data_offsets": [start, end]}
        start = end
    return layout


def _arrays(data: mmap.mmap, start: int, layout: dict[str, Any]) -> Arrays:
    """Return the arrays that begin at a byte of the map."""
    text, links, heads = (
        np.frombuffer(data, np.int32, math.prod(each["shape"]), start + each["data_offsets"][0])
        for each in layout.values()
    )
    return text, links.reshape(-1, NUM_KEYS), heads


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


def _contents(metadata: dict[str, str], arrays: Arrays, file: OpenFile) -> Contents:
    """Return the contents if no compiled function could read or write beside the arrays."""
    max_tokens, most_ids = int(metadata["max_tokens"]), MOST_VOCABULARY
    vocab_size, fingerprint = metadata.get("vocab_size"), metadata.get("tokenizer_fingerprint")
    text, links, heads = arrays
    if not len(text) <= max_tokens <= MOST_TOKENS:
        raise ValueError("its number of tokens is out of range")
    if vocab_size is not None:
        most_ids = int(vocab_size)
        if not 1 <= most_ids <= MOST_VOCABULARY:
            raise ValueError("its vocabulary size is out of range")
    bounds = {"a token": (text, most_ids), "a link": (links, len(text))}
    bounds["an entry"] = heads, NUM_KEYS * len(text)
    for name, (array, most) in bounds.items():
        if array.min(initial=BORDER) < BORDER or array.max(initial=BORDER) >= max(1, most):
            raise ValueError(f"{name} is out of range")
    if not (heads == -1).any():
        raise ValueError("its table is full")
    known = None if vocab_size is None else most_ids
    return Contents(
        max_tokens, known, None if fingerprint is None else str(fingerprint), arrays, file
    )


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _not_a_pool(path: str | os.PathLike[str]) -> ValueError:
    return ValueError(
        f"{os.fspath(path)} is not a pool, or a damaged one: make one with `lookahead-hf pool "
        "build` or `NgramPool.save`"
    )
