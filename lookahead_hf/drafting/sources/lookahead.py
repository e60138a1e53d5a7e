"""Drafts from a Jacobi window, in which the target writes n-grams ahead of its text.

Lookahead decoding (Fu et al., arXiv:2402.02057) keeps a window of guessed tokens, which the target
continues in every step. The resulting n-grams often turn up when the text gets there. Here the
window is part of an ordinary draft tree: its first level is a chain, and the continuation of each
token a branch below it. So it needs no mask of its own, and is verified like any draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from lookahead_hf.config import check_int
from lookahead_hf.draft import ROOT, DraftTree, RowDraft, Verdict
from lookahead_hf.drafting.drafter import BuiltInDrafter
from lookahead_hf.rows import Rows

DEPTH_CLASSES = 4
"""Depths 1, 2, 3, and beyond."""

NEWEST_NGRAM, OLDER_NGRAM, WINDOW = range(3)
_PRIOR = [0.35, 0.15, 0.08]
"""Kinds of proposals, and their acceptance rates before anything was learned."""


class WindowNgrams:
    """The newest n-grams of a row by their first token, each once."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._ngrams: dict[int, list[tuple[int, ...]]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram, or note that it was seen again."""
        first, *rest = ngram
        known = self._ngrams.setdefault(first, [])
        if tuple(rest) in known:
            known.remove(tuple(rest))
        known.append(tuple(rest))
        del known[: -self._num_kept]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Return what followed a token, newest first."""
        return self._ngrams.get(token, [])[::-1]


class _RowWindow:
    """A row's window and its n-grams.

    Column i of level j is 1 + i + j places after the last token. It follows the columns up to i of
    level 0 and the earlier levels of its column. The logits at the last level give the next level.
    """

    def __init__(
        self, context: np.ndarray, num_columns: int, pool: WindowNgrams, ngram_size: int, seed: int
    ) -> None:
        """Fill the window with pieces of the context and collect its n-grams."""
        self.pool, self._ngram_size = pool, ngram_size
        self._random = np.random.default_rng(seed)
        self.levels = self._pieces(context, num_columns)  # [levels, columns]
        self._collect(context, len(context))

    def _collect(self, context: np.ndarray, num_new: int) -> None:
        """Collect the n-grams that end with one of the newest tokens of the text."""
        first = max(0, len(context) - num_new - self._ngram_size + 1)
        tokens = context[first:].tolist()
        for start in range(len(tokens) - self._ngram_size + 1):
            self.pool.add(tokens[start : start + self._ngram_size])

    def advance(self, context: np.ndarray, num_new: int, written: np.ndarray) -> None:
        """Move the window past the `num_new` new tokens of the context, and collect n-grams.

        `written`, [columns], is what the target wrote after each column, -1 for nothing.
        """
        num_columns = len(written)
        was_asked = written >= 0
        for column in np.flatnonzero(was_asked).tolist():
            self.pool.add([*self.levels[:, column].tolist(), int(written[column])])
        shift = num_new
        if was_asked.any():
            self.levels = np.vstack([self.levels[1:], written])
            self.levels[:, ~was_asked] = self._pieces(context, int((~was_asked).sum()))
            shift -= 1  # every level is now one place further on
        kept = self.levels[:, min(shift, num_columns) :]
        filled = self._pieces(context, num_columns - kept.shape[1])
        self.levels = np.hstack([kept, filled])
        self._collect(context, num_new)

    def _pieces(self, context: np.ndarray, count: int) -> np.ndarray:
        """Return random pieces of the text, one per column, [levels, count]."""
        size = self._ngram_size - 1
        if len(context) < size:
            context = np.resize(context, size)
        starts = self._random.integers(0, len(context) - size + 1, count)
        return context[starts[None] + np.arange(size)[:, None]]


class _WindowDraft(RowDraft):
    """The draft of one row: n-grams of the pool, and the window."""

    def _follow(self, parent: int, token: int, kind: int) -> int:
        depth = min(self.depth_below(parent), DEPTH_CLASSES)
        return self.child(parent, token, kind * DEPTH_CLASSES + depth - 1)

    def add_ngrams(self, ngrams: Sequence[Sequence[int]], max_nodes: int) -> None:
        """Add n-grams after the last token, as long as they fit."""
        for rank, ngram in enumerate(ngrams):
            if len(self.tokens) + len(ngram) > max_nodes:
                return
            node = ROOT
            for token in ngram:
                node = self._follow(node, token, OLDER_NGRAM if rank else NEWEST_NGRAM)

    def add_window(self, levels: list[list[int]]) -> None:
        """Add a window after the last token: level 0 as a chain, the other levels as branches."""
        stem = ROOT
        for first, *others in zip(*levels, strict=True):
            stem = node = self._follow(stem, first, WINDOW)
            for token in others:
                node = self._follow(node, token, WINDOW)


class LookaheadDrafter(BuiltInDrafter):
    """Writes n-grams ahead of the text by Jacobi iteration, in a window of every row's draft.

    A draft has up to `(ngram_size - 1) * (window + num_ngrams)` nodes per row. Only columns that
    are verified to their end advance, so a smaller budget starves the window. Use this source alone
    and with a fixed budget.
    """

    name: ClassVar[str] = "lookahead"
    num_buckets = len(_PRIOR) * DEPTH_CLASSES

    def __init__(self, *, window: int = 7, ngram_size: int = 5, num_ngrams: int = 7) -> None:
        """Validate the options; ValueError if one is out of its range.

        Args:
            window: Columns of the window, W in the paper.
            ngram_size: Tokens of an n-gram, its first one included; N.
            num_ngrams: N-grams to keep, and to propose, for each first token; G.
        """
        for option, value, least in (
            ("window", window, 1),
            ("ngram_size", ngram_size, 2),
            ("num_ngrams", num_ngrams, 1),
        ):
            check_int(f"lookahead: {option}", value, least, 64)
        self._window, self._ngram_size, self._num_ngrams = window, ngram_size, num_ngrams
        self._rows: list[_RowWindow] = []

    def prior(self) -> np.ndarray:
        return np.repeat(_PRIOR, DEPTH_CLASSES).astype(np.float32)

    def begin(self, rows: Rows) -> None:
        self._rows = [
            _RowWindow(context, self._window, WindowNgrams(self._num_ngrams), self._ngram_size, row)
            for row, context in enumerate(map(rows.context, range(rows.num_rows)))
        ]

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        drafts = [_WindowDraft() for _ in self._rows]
        for row in np.flatnonzero(rows.live).tolist():
            # N-grams are likelier than the window, but the window needs room to make new ones.
            ngrams = self._rows[row].pool.after(rows.last_token(row))
            drafts[row].add_ngrams(ngrams, max_nodes // 2)
            drafts[row].add_window(self._rows[row].levels.tolist())
        return DraftTree.from_drafts(drafts)

    def observe(self, rows: Rows, draft: DraftTree, verdict: Verdict, logits: torch.Tensor) -> None:
        live = np.flatnonzero(verdict.live & ~verdict.finished).tolist()
        if not live:
            return
        places = np.array(
            [_last_level(draft, row, self._rows[row].levels.tolist()) for row in live]
        )
        written = np.full(places.shape, -1, np.int64)
        row, place = np.repeat(live, (places > 0).sum(1)), places[places > 0]
        at = torch.from_numpy(np.stack([row, place])).to(logits.device)
        written[places > 0] = logits[at[0], at[1]].argmax(-1).cpu().numpy()
        for index, of_row in zip(live, written, strict=True):
            num_new = len(verdict.emitted(index))
            self._rows[index].advance(rows.context(index), num_new, of_row)

    def end(self, rows: Rows) -> None:
        self._rows = []


def _last_level(draft: DraftTree, row: int, levels: list[list[int]]) -> list[int]:
    """Return the place of each column's last node in the row's logits, 0 if it was not verified."""
    places = []
    stem: int | None = ROOT
    for first, *others in zip(*levels, strict=True):
        stem = node = None if stem is None else draft.child_of(row, stem, first)
        for token in others:
            node = None if node is None else draft.child_of(row, node, token)
        places.append(0 if node is None else node + 1)
    return places
