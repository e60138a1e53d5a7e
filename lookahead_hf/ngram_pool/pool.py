"""A bounded memory of texts across requests: finds what followed a context in any of them."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from lookahead_hf.ngram_pool.compilation import drafting
from lookahead_hf.ngram_pool.matches import BORDER, NUM_KEYS
from lookahead_hf.ngram_pool.suffix_index import Arrays, SuffixIndexes
from lookahead_hf.utils import replacing

FORMAT = "lookahead_hf.ngram_pool"
VERSION = 2

MOST_TOKENS = 2**29  # Largest pool: an int32 entry of `heads` keeps a place and the number of a key

MOST_VOCABULARY = 2**31 - 1

CHUNK = 1024  # Tokens that are added at once: the most that another thread's look-up waits for


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """The contents of a pool in numbers.

    Attributes:
        num_tokens: Tokens held.
        num_texts: Ends of texts held.
        max_tokens: Most tokens and ends of texts that the pool can hold.
        num_ngrams: 1-, 2-, 4- and 8-grams that can be looked up, different ones in each half.
        nbytes: Size of the contents, in memory as in a file.
        vocab_size: All token ids are below it; None: unknown.
        tokenizer_fingerprint: Identifies the tokenizer; None: unknown.
    """

    num_tokens: int
    num_texts: int
    max_tokens: int
    num_ngrams: int
    nbytes: int
    vocab_size: int | None
    tokenizer_fingerprint: str | None


class NgramPool:
    """Remembers the newest tokens of all texts that were added, and finds n-grams in them.

    It has two indexes: one that grows, and an older one with about half of `max_tokens`. When the
    pool is full, the older tokens leave, the other index takes their place, and an empty one
    begins. All methods may be called from several threads. Texts that are added to a loaded pool
    stay in this process until `save`.

    Example:
        >>> pool = NgramPool()
        >>> pool.add([5, 6, 7, 8])
        >>> _, token_ids, *_ = pool.grow([[1, 5, 6]], np.full(NUM_BUCKETS, 0.5), max_nodes=3)
        >>> token_ids.tolist()
        [7, 8]
    """

    def __init__(
        self,
        max_tokens: int = 10_000_000,
        *,
        vocab_size: int | None = None,
        tokenizer_fingerprint: str | None = None,
    ) -> None:
        """Start an empty pool, which takes memory as it fills: 25 to 45 bytes a token.

        Args:
            max_tokens: Most tokens to hold; the end of each text counts as one.
            vocab_size: Token ids must be below it.
            tokenizer_fingerprint: Identifies the tokenizer of the texts.

        Raises:
            NumbaMissingError: numba is missing or cannot be imported.
            ValueError: An argument has the wrong type or is out of range.
        """
        _check_int("max_tokens", max_tokens, 2, MOST_TOKENS)
        if vocab_size is not None:
            _check_int("vocab_size", vocab_size, 1, MOST_VOCABULARY)
        if not isinstance(tokenizer_fingerprint, (str, type(None))):
            raise ValueError(
                f"tokenizer_fingerprint must be a str or None, not {tokenizer_fingerprint!r}"
            )
        self._max_tokens, self._vocab_size = max_tokens, vocab_size
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._index = SuffixIndexes(2)  # the one that grows, and the older one
        # Adding, merging and saving exclude each other; a look-up waits for one chunk at most.
        self._adding = threading.Lock()
        self._lock = threading.Lock()

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, verifies: bool = False) -> NgramPool:
        """Read a file of `save`; `verifies` also compares the checksum of all data.

        The file may be deleted or replaced afterwards. If it holds more than half of the pool's
        most tokens, all of them stay until half of the most tokens were added.

        Raises:
            NumbaMissingError: numba is missing or cannot be imported.
            OSError: The file cannot be read.
            ValueError: It is not a pool, or is damaged.
        """
        metadata, arrays = _read(path)
        try:
            known = metadata.get("vocab_size")
            pool = cls(
                int(metadata["max_tokens"]),
                vocab_size=None if known is None else int(known),
                tokenizer_fingerprint=metadata.get("tokenizer_fingerprint"),
            )
            _check_arrays(arrays, pool.vocab_size or MOST_VOCABULARY)
            if len(arrays[0]) > pool._max_tokens:
                raise ValueError("its number of tokens is out of range")
            if verifies and pool._metadata(arrays)["sha256"] != metadata["sha256"]:
                raise ValueError("its checksum does not match")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{os.fspath(path)}: the pool is damaged ({error}): restore the file, or build it "
                "again"
            ) from error
        pool._index.fill(int(len(arrays[0]) > pool._half), arrays)
        return pool

    def __len__(self) -> int:
        """Return the number of tokens that the pool holds."""
        return int(np.count_nonzero(self._text() > BORDER))

    @property
    def vocab_size(self) -> int | None:
        """All token ids are below it; None: unknown."""
        return self._vocab_size

    @property
    def tokenizer_fingerprint(self) -> str | None:
        """Identifies the tokenizer; None: unknown."""
        return self._tokenizer_fingerprint

    @property
    def info(self) -> PoolInfo:
        """The contents of the pool in numbers."""
        with self._adding:
            text = self._text()
            num_tokens = int(np.count_nonzero(text > BORDER))
            return PoolInfo(
                num_tokens=num_tokens,
                num_texts=len(text) - num_tokens,
                max_tokens=self._max_tokens,
                num_ngrams=sum(map(self._index.num_entries, range(2))),
                nbytes=sum(array.nbytes for row in range(2) for array in self._index.filled(row)),
                vocab_size=self._vocab_size,
                tokenizer_fingerprint=self._tokenizer_fingerprint,
            )

    def add(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Add a text, [num_tokens]: no n-gram spans it and the next one.

        Raises:
            ValueError: The ids are not integers from 0 to the largest id of the vocabulary.
        """
        ids = self._checked(token_ids)
        if len(ids):
            with self._adding:
                self._append(np.append(ids, np.int32(BORDER)))

    def merge(self, other: NgramPool) -> None:
        """Add all texts of another pool, oldest first, as `add` would.

        If only the other pool knows its tokenizer, this pool adopts it.

        Raises:
            ValueError: `other` is not a pool, or the pools' vocabularies or tokenizers do not fit.
        """
        if not isinstance(other, NgramPool):
            raise ValueError(f"expected an NgramPool to merge, got {other!r}")
        for name in ("vocab_size", "tokenizer_fingerprint"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if None not in (ours, theirs) and ours != theirs:
                raise ValueError(
                    f"the pools have {name} {ours!r} and {theirs!r}: only pools of one tokenizer "
                    "can be merged"
                )
        with other._adding:
            texts = other._text()
        with self._adding:
            self._adopt(other, texts)
            self._append(texts)

    def grow(
        self, contexts: Sequence[Sequence[int] | np.ndarray], rates: np.ndarray, max_nodes: int
    ) -> tuple[np.ndarray, ...]:
        """Grow the trees of what may follow each context, a text or its end.

        `rates` is the acceptance rate of each bucket, [NUM_BUCKETS]. A tree has up to `max_nodes`
        nodes from each half of the pool. Returns what `SuffixIndexes.grow_after` does.
        """
        drafting.require()
        with self._lock:
            return self._index.grow_after(contexts, rates, max_nodes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; an older one is replaced once the new one is complete.

        The halves of a pool that has two are indexed together first.

        Raises:
            OSError: The file cannot be written.
        """
        with self._adding:
            arrays = self._joined()
            tensors = dict(zip(("text", "links", "heads"), arrays, strict=True))
            content = safetensors.numpy.save(tensors, self._metadata(arrays))
        with replacing(Path(path)) as file:
            file.write(content)

    @property
    def _half(self) -> int:
        return self._max_tokens // 2

    def _room(self) -> int:
        newer, older = map(self._index.length, range(2))
        return (max(self._half, self._max_tokens - older) if older else self._half) - newer

    def _checked(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        ids = np.asarray(token_ids)
        if not ids.size:
            return np.empty(0, np.int32)
        most = self._vocab_size or MOST_VOCABULARY
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= most:
            raise ValueError(
                f"a text must be a sequence of token ids from 0 to {most - 1}, not "
                f"{token_ids!r:.80}"
            )
        return ids.astype(np.int32)

    def _text(self) -> np.ndarray:
        """Return a copy of all tokens, oldest first, with borders between the texts."""
        return np.concatenate([arrays[0] for arrays in map(self._index.filled, (1, 0))])

    def _joined(self) -> Arrays:
        held = [row for row in range(2) if self._index.length(row)]
        if len(held) < 2:
            return self._index.filled(held[0] if held else 0)
        text = self._text()[-self._max_tokens :]
        joined = SuffixIndexes(1)
        joined.extend(np.array([0, len(text)]), text)
        return joined.filled(0)

    def _metadata(self, arrays: Arrays) -> dict[str, str]:
        text, _, heads = arrays
        values = {
            "max_tokens": self._max_tokens,
            "num_tokens": len(text),
            "num_slots": len(heads),
            "vocab_size": self._vocab_size,
            "tokenizer_fingerprint": self._tokenizer_fingerprint,
        }
        numbers = {name: str(value) for name, value in values.items() if value is not None}
        digest = hashlib.sha256(json.dumps(numbers, sort_keys=True).encode())
        for array in arrays:
            digest.update(np.ascontiguousarray(array).tobytes())
        return {"format": FORMAT, "version": str(VERSION), "sha256": digest.hexdigest(), **numbers}

    def _adopt(self, other: NgramPool, texts: np.ndarray) -> None:
        """Adopt the other pool's tokenizer if it is unknown here; `texts` are its tokens."""
        vocab_size = self._vocab_size or other.vocab_size
        most = max(self._text().max(initial=BORDER), texts.max(initial=BORDER))
        if vocab_size is not None and most >= vocab_size:
            raise ValueError(
                f"the pools have token ids up to {most}, but their vocabulary has {vocab_size}: "
                "one of them is damaged, or their tokenizers differ"
            )
        self._vocab_size = vocab_size
        self._tokenizer_fingerprint = self.tokenizer_fingerprint or other.tokenizer_fingerprint

    def _append(self, token_ids: np.ndarray) -> None:  # [num_tokens] int32
        drafting.require()
        token_ids = token_ids[-self._max_tokens :]
        while len(token_ids):
            if self._room() <= 0:
                newest = self._index.moved_on(self._max_tokens - self._half)
                with self._lock:
                    self._index = newest
            room = self._room()
            chunk, token_ids = np.split(token_ids, [min(CHUNK, room)])
            # Look-ups go on in the old index while a larger one is made.
            index = self._index.with_room(len(chunk), len(chunk) + min(len(token_ids), room))
            with self._lock:
                self._index = index
                index.extend(np.array([0, len(chunk), len(chunk)]), chunk)


def _check_int(name: str, value: Any, least: int, most: int) -> None:
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}, but must be an int in {least}..{most}")


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, str], Arrays]:
    """Return the metadata and the arrays of a pool's file."""
    try:
        with safetensors.safe_open(os.fspath(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"its format is {metadata.get('format')!r}")
            text, links, heads = map(file.get_tensor, ("text", "links", "heads"))
    except (TypeError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(
            f"{os.fspath(path)} is not a pool, or a damaged one ({error}): make one with "
            "`lookahead-hf pool build` or `NgramPool.save`"
        ) from error
    if metadata.get("version") != str(VERSION):
        raise ValueError(
            f"{os.fspath(path)}: the pool has format version {metadata.get('version')}, but this "
            f"lookahead_hf reads version {VERSION}: build the pool again, or install the version "
            "that wrote it"
        )
    return metadata, (text, links, heads)


def _check_arrays(arrays: Arrays, most_ids: int) -> None:
    """Refuse arrays with which a compiled function would read or write beside them."""
    text, links, heads = arrays
    shapes = [array.shape for array in arrays]
    if shapes != [(len(text),), (len(text), NUM_KEYS), (len(heads),)]:
        raise ValueError(f"its arrays have the shapes {shapes}")
    if any(array.dtype != np.int32 for array in arrays):
        raise ValueError("its arrays are not int32")
    bounds = {"a token": (text, most_ids), "a link": (links, len(text))}
    bounds["an entry"] = heads, NUM_KEYS * len(text)
    for name, (array, most) in bounds.items():
        if array.min(initial=BORDER) < BORDER or array.max(initial=BORDER) >= max(1, most):
            raise ValueError(f"{name} is out of range")
    if not (heads == -1).any():
        raise ValueError("its table is full")


def open_pool(pool: NgramPool | str | os.PathLike[str]) -> NgramPool:
    """Return the pool itself, or the pool of a file, which is read again only after a change.

    Texts that are added to a pool from a file stay in this process. ValueError if the file is
    missing, unreadable, damaged or no pool.
    """
    if isinstance(pool, NgramPool):
        return pool
    path = os.path.realpath(pool)
    try:
        state = os.stat(path)
        with _opening:
            return _opened(path, state.st_mtime_ns, state.st_size, state.st_ino)
    except OSError as error:
        raise ValueError(
            f"the pool {os.fspath(pool)!r} cannot be read ({error.strerror or error}): build one "
            "with `lookahead-hf pool build` or `NgramPool.save`, or leave pool= out and name the "
            'drafter "pool", which then fills one in memory'
        ) from error


_opening = threading.Lock()


@lru_cache(maxsize=8)
def _opened(path: str, *state: int) -> NgramPool:
    return NgramPool.load(path)
