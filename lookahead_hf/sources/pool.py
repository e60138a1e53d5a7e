"""Drafts from other requests: what followed the same tokens in a pool of n-grams.

In replays with 64 nodes on texts of a 135M model, a pool of 3 million tokens of source code raised
the tokens per step of n-grams and recycling from 2.84 to 3.07, although the texts were chat, and to
26 or more for repeated requests. Acceptance rates of its own tell how much to trust the pool.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting.drafter import Drafter, Traits
from lookahead_hf.drafting.sources.ngram import rates_of
from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.ngram_pool.matches import NUM_BUCKETS
from lookahead_hf.rows import Rows

ONLY_CONTINUATION = (0.08, 0.10, 0.20, 0.33, 0.35, 0.42, 0.48, 0.52, 0.65, 0.80, 0.85)
"""Acceptance rate of the only known continuation by match-length class, as in `ngram`. Measured on
source code drafted from other source code and on chat drafted from source code."""

CONTEXT = 8  # Prompt tokens learned before a generated text, so that its beginning is found


class PoolDrafter(Drafter):
    """Grows one tree per row from a pool that outlives the call."""

    name: ClassVar[str] = "pool"
    traits = Traits(NUM_BUCKETS, rates_of(ONLY_CONTINUATION), widens=True)

    def __init__(
        self,
        pool: NgramPool,
        *,
        learn: bool = False,
        vocab_size: int | None = None,
        tokenizer: Any = None,
    ) -> None:
        """Validate the options.

        Args:
            pool: The pool to draft from.
            learn: Whether the generated texts are added to the pool when the call ends, each after
                the last tokens of its prompt. Without it nothing of one request reaches another.
            vocab_size: Token ids of the target.
            tokenizer: The target's tokenizer or processor, if the caller passed it.

        Raises:
            ValueError: An option is wrong, or the pool belongs to another tokenizer.
        """
        if not isinstance(pool, NgramPool):
            raise ValueError(f"pool must be an NgramPool (`open_pool` opens a file), not {pool!r}")
        if not isinstance(learn, bool):
            raise ValueError(f"learn must be True or False, not {learn!r}")
        _check_tokenizer(pool, vocab_size, getattr(tokenizer, "tokenizer", tokenizer))
        self._pool, self._learn = pool, learn

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        contexts = [
            rows.context(row) if live else np.empty(0, np.int64)
            for row, live in enumerate(rows.live)
        ]
        offsets, tokens, parents, depth, score, buckets = self._pool.grow(
            contexts, self.rates, max_nodes
        )
        return DraftTree(offsets, tokens, parents, depth, score).with_buckets(buckets)

    def end_row(self, rows: Rows, row: int) -> None:
        if self._learn and rows.num_text[row]:
            text = rows.prompt_length(row)
            end = text + int(rows.num_text[row])  # pads may follow
            self._pool.add(rows.context(row)[max(0, text - CONTEXT) : end])

    def end(self, rows: Rows) -> None:
        for row in range(rows.num_rows):
            self.end_row(rows, row)


def fingerprint(tokenizer: Any) -> str:
    """Identify a tokenizer, anything with `get_vocab()`, by a hash of its vocabulary."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:32]


def _check_tokenizer(pool: NgramPool, vocab_size: int | None, tokenizer: Any) -> None:
    """Refuse a pool of another tokenizer, as far as it is known."""
    if vocab_size is not None and (pool.vocab_size or 0) > vocab_size:
        raise ValueError(
            f"the pool has token ids below {pool.vocab_size}, the model below {vocab_size}: "
            "build a pool with the tokenizer of this model"
        )
    known = pool.tokenizer_fingerprint
    if known is None or not hasattr(tokenizer, "get_vocab"):
        return
    # The hash takes as long as a step or two, and vocabularies only grow.
    size, found = _fingerprints.get(tokenizer, (0, ""))
    if size != len(tokenizer):
        found = fingerprint(tokenizer)
        _fingerprints[tokenizer] = len(tokenizer), found
    if found != known:
        raise ValueError(
            f"the pool was built with the tokenizer {known}, the model's is {found}: build a pool "
            "with the tokenizer of this model (`lookahead-hf pool build --tokenizer`)"
        )


_fingerprints: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()
