"""A bounded memory of texts across requests: finds what followed a context in any of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from lookahead_hf.ngram_pool import store
from lookahead_hf.ngram_pool.compilation import drafting
from lookahead_hf.ngram_pool.matches import (
    BORDER,
    LONGEST_MATCH,
    Continuations,
    check_limits,
)
from lookahead_hf.ngram_pool.store import MOST_TOKENS, MOST_VOCABULARY, Contents
from lookahead_hf.ngram_pool.suffix_index import SuffixIndexes

CHUNK = 1024
"""Tokens that are added at once: the most that another thread's look-up waits for."""


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """The contents of a pool in numbers.

    Attributes:
        num_tokens: Tokens held.
        num_texts: Ends of texts held.
        max_tokens: Most tokens and ends of texts that the pool can hold.
        num_ngrams: Different 1-, 2-, 4- and 8-grams that can be looked up.
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

    When it is full, the older half of its tokens leaves, and the newer half is indexed again. All
    methods may be called from several threads.

    A loaded pool maps its file and never writes to it: added texts stay in this process until
    `save`. The file may be deleted or replaced meanwhile, but not written into: every method then
    raises ValueError until the pool is loaded again, and a process that is reading the file at that
    moment may end.

    Example:
        >>> pool = NgramPool()
        >>> pool.add([5, 6, 7, 8])
        >>> pool.grow([1, 5, 6], np.full(NUM_BUCKETS, 0.5), max_nodes=3).token_ids.tolist()
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
        _check_int("max_tokens", max_tokens, MOST_TOKENS)
        if vocab_size is not None:
            _check_int("vocab_size", vocab_size, MOST_VOCABULARY)
        if not isinstance(tokenizer_fingerprint, (str, type(None))):
            raise ValueError(
                f"tokenizer_fingerprint must be a str or None, not {tokenizer_fingerprint!r}"
            )
        empty = SuffixIndexes(1).filled(0)
        self._start(Contents(max_tokens, vocab_size, tokenizer_fingerprint, empty))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        vocab_size: int | None = None,
        tokenizer_fingerprint: str | None = None,
    ) -> NgramPool:
        """Open a file of `save` by memory map; `lookahead-hf pool check` compares its checksum.

        Args:
            path: The file.
            vocab_size: Refuse a pool with another vocabulary size.
            tokenizer_fingerprint: Refuse a pool of another tokenizer.

        Raises:
            NumbaMissingError: numba is missing or cannot be imported.
            OSError: The file cannot be read.
            ValueError: It is not a pool, is damaged, or belongs to another tokenizer.
        """
        file = store.read(path)
        needed = {"vocab_size": vocab_size, "tokenizer_fingerprint": tokenizer_fingerprint}
        for name, value in needed.items():
            found = getattr(file, name)
            if value is not None and found != value:
                raise ValueError(
                    f"{os.fspath(path)}: the pool has {name}={found!r}, but {value!r} is needed: "
                    "build a pool with the tokenizer of this model"
                )
        pool = cls.__new__(cls)
        pool._start(file)
        return pool

    def _start(self, contents: Contents) -> None:
        self._max_tokens, self._file = contents.max_tokens, contents.file
        self._vocab_size = contents.vocab_size
        self._tokenizer_fingerprint = contents.tokenizer_fingerprint
        self._index = SuffixIndexes.of_arrays(contents.arrays)
        # Adding, merging and saving exclude each other; a look-up waits for one chunk at most.
        self._adding = threading.Lock()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of tokens that the pool holds."""
        return int(np.count_nonzero(self._contents().arrays[0] > BORDER))

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
            arrays, num_tokens = self._contents().arrays, len(self)
            return PoolInfo(
                num_tokens=num_tokens,
                num_texts=len(arrays[0]) - num_tokens,
                max_tokens=self._max_tokens,
                num_ngrams=self._index.num_entries(0),
                nbytes=sum(array.nbytes for array in arrays),
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
            texts = other._contents().arrays[0].copy()
        with self._adding:
            self._adopt(other, texts)
            self._append(texts)

    def grow(
        self,
        context: Sequence[int] | np.ndarray,
        rates: np.ndarray,
        max_nodes: int,
        *,
        min_ngram: int = 1,
        max_ngram: int = LONGEST_MATCH,
        min_score: float = 1e-4,
    ) -> Continuations:
        """Grow a tree of what may follow a context, best nodes first.

        Args:
            context: A text or its end, [num_tokens].
            rates: Acceptance rate of each bucket, [NUM_BUCKETS], values from 0 to 1.
            max_nodes: Most nodes of the tree.
            min_ngram: Shortest match that counts.
            max_ngram: Longest match length that is distinguished.
            min_score: Paths with a lower score are left out.

        Raises:
            ValueError: Not `1 <= min_ngram <= max_ngram <= 32`.
        """
        limits = (min_ngram, max_ngram)
        check_limits(*limits)
        context = np.asarray(context[-max_ngram:], np.int64)
        _, tokens, parents, depth, score, bucket = self.grow_after(
            [context], rates, max_nodes, limits, min_score
        )
        return Continuations(score, tokens, parents, depth, bucket)

    def grow_after(
        self,
        contexts: Sequence[np.ndarray],
        rates: np.ndarray,
        max_nodes: int,
        limits: tuple[int, int],
        min_score: float = 1e-4,
    ) -> tuple[np.ndarray, ...]:
        """Grow a tree after each context, as `SuffixIndexes.grow_after` does."""
        self._check_file()
        drafting.require()
        with self._lock:
            return self._index.grow_after(contexts, rates, max_nodes, limits, min_score)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; an older one is replaced once the new one is complete.

        Raises:
            OSError: The file cannot be written.
        """
        with self._adding:
            store.write(path, self._contents())

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

    def _contents(self) -> Contents:
        self._check_file()
        known = self._vocab_size, self._tokenizer_fingerprint
        return Contents(self._max_tokens, *known, self._index.filled(0))

    def _check_file(self) -> None:
        if self._file is not None:
            self._file.check()

    def _adopt(self, other: NgramPool, texts: np.ndarray) -> None:
        """Adopt the other pool's tokenizer if it is unknown here; `texts` are its tokens."""
        vocab_size = self._vocab_size or other.vocab_size
        own = self._contents().arrays[0]
        most = max(own.max(initial=BORDER), texts.max(initial=BORDER))
        if vocab_size is not None and most >= vocab_size:
            raise ValueError(
                f"the pools have token ids up to {most}, but their vocabulary has {vocab_size}: "
                "one of them is damaged, or their tokenizers differ"
            )
        self._vocab_size = vocab_size
        self._tokenizer_fingerprint = self.tokenizer_fingerprint or other.tokenizer_fingerprint

    def _append(self, token_ids: np.ndarray) -> None:  # [num_tokens] int32
        drafting.require()
        held = self._contents().arrays[0]
        token_ids = token_ids[-self._max_tokens :]
        if len(held) + len(token_ids) > self._max_tokens:
            kept = max(0, self._max_tokens // 2 - len(token_ids))
            newest = SuffixIndexes(1)
            newest.extend(np.array([0, kept]), held[len(held) - kept :])
            self._index = newest
        for start in range(0, len(token_ids), CHUNK):
            chunk = token_ids[start : start + CHUNK]
            # Look-ups go on in the old index while a larger one is made.
            index = self._index.with_room(len(chunk), len(token_ids) - start)
            with self._lock:
                self._index = index
                index.extend(np.array([0, len(chunk)]), chunk)


def _check_int(name: str, value: Any, most: int) -> None:
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_int or not 1 <= value <= most:
        raise ValueError(f"{name} is {value!r}, but must be an int in 1..{most}")


def open_pool(pool: NgramPool | str | os.PathLike[str]) -> NgramPool:
    """Return the pool itself, or the pool of a file, which is opened again only after a change.

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
