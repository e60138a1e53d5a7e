"""Drafts from a Jacobi window, in which the target writes n-grams ahead of its text.

Lookahead Decoding (Fu et al., arXiv:2402.02057) keeps a window of guessed tokens, which the target
continues in every step. The resulting n-grams often turn up when the text gets there. Here the
window is part of an ordinary draft tree: its first level is a chain, and the continuation of each
token a branch below it. So it needs no mask of its own, and is verified like any draft.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from lookahead_hf.config import check_int
from lookahead_hf.draft import ROOT, DraftTree, RowDraft
from lookahead_hf.drafting.drafter import Drafter, Step, Traits
from lookahead_hf.rows import Rows

DEPTH_CLASSES = 4  # Depths 1, 2, 3, and beyond

NEWEST_NGRAM, OLDER_NGRAM, WINDOW = range(3)
PRIOR = (0.35, 0.15, 0.08)
"""Kinds of proposals, and their acceptance rates before anything was learned."""


class Window:
    """A row's window and its n-grams.

    Column i of level j is 1 + i + j places after the last token. It follows the columns up to i of
    level 0 and the earlier levels of its column. What the target writes after the last level is the
    next one.
    """

    def __init__(self, context: np.ndarray, shape: tuple[int, int], num_kept: int) -> None:
        """Fill a window of that shape with pieces of the context and collect its n-grams.

        The `num_kept` newest n-grams are kept for each first token.
        """
        self._num_kept, self._random = num_kept, np.random.default_rng(len(context))
        self._ngrams: dict[int, list[tuple[int, ...]]] = {}
        self.levels = self._pieces(context, *shape)  # the guessed tokens, [levels, columns]
        self._collect(context, len(context))

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Return what followed a token, newest first."""
        return self._ngrams.get(token, [])[::-1]

    def add(self, ngrams: np.ndarray) -> None:
        """Add n-grams, [ngrams, tokens], or note that they were seen again."""
        for first, *rest in ngrams.tolist():
            known = self._ngrams.setdefault(first, [])
            if tuple(rest) in known:
                known.remove(tuple(rest))
            known.append(tuple(rest))
            del known[: -self._num_kept]

    def _collect(self, context: np.ndarray, num_new: int) -> None:
        size = len(self.levels) + 1
        newest = context[max(0, len(context) - num_new - size + 1) :]
        if len(newest) >= size:
            self.add(np.lib.stride_tricks.sliding_window_view(newest, size))

    def _pieces(self, context: np.ndarray, size: int, count: int) -> np.ndarray:
        """Return random pieces of the text, one per column, [size, count]."""
        if len(context) < size:
            context = np.resize(context, size)
        starts = self._random.integers(0, len(context) - size + 1, count)
        return context[starts + np.arange(size)[:, None]]

    def advance(self, context: np.ndarray, num_new: int, written: np.ndarray) -> None:
        """Move the window past the `num_new` new tokens of the context, and collect n-grams.

        `written`, [columns], is what the target wrote after each column, -1 for nothing.
        """
        was_asked = written >= 0
        self.add(np.vstack([self.levels, written])[:, was_asked].T)
        size, count = self.levels.shape
        if was_asked.any():
            self.levels = np.vstack([self.levels[1:], written])
            self.levels[:, ~was_asked] = self._pieces(context, size, int((~was_asked).sum()))
        # Every level is then one place further on.
        kept = self.levels[:, num_new - int(was_asked.any()) :]
        filled = self._pieces(context, size, count - kept.shape[1])
        self.levels = np.hstack([kept, filled])
        self._collect(context, num_new)


class LookaheadDrafter(Drafter):
    """Writes n-grams ahead of the text by Jacobi iteration, in a window of every row's draft.

    A draft has up to `(ngram_size - 1) * (window + num_ngrams)` nodes per row. Only columns that
    are verified to their end advance, so a smaller budget starves the window. Use this source alone
    and with a fixed budget.
    """

    name: ClassVar[str] = "lookahead"
    traits = Traits(
        len(PRIOR) * DEPTH_CLASSES, np.repeat(PRIOR, DEPTH_CLASSES), needs={"best_tokens": (1, 1)}
    )

    def __init__(self, *, window: int = 7, ngram_size: int = 5, num_ngrams: int = 7) -> None:
        """Validate the options; ValueError if one is out of its range.

        Args:
            window: Columns of the window, W in the paper.
            ngram_size: Tokens of an n-gram, its first one included; N.
            num_ngrams: N-grams to keep, and to propose, for each first token; G.
        """
        options = (("window", window, 1), ("ngram_size", ngram_size, 2))
        for option, value, least in (*options, ("num_ngrams", num_ngrams, 1)):
            check_int(f"lookahead: {option}", value, least, 64)
        self._shape, self._num_ngrams = (ngram_size - 1, window), num_ngrams
        self._windows: dict[int, Window] = {}

    def begin(self, rows: Rows) -> None:
        for row in range(rows.num_rows):
            self.begin_row(rows, row)

    def begin_row(self, rows: Rows, row: int) -> None:
        self._windows[row] = Window(rows.context(row), self._shape, self._num_ngrams)

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        drafts = [RowDraft() for _ in range(rows.num_rows)]
        for row in np.flatnonzero(rows.live).tolist():
            draft, window = drafts[row], self._windows[row]
            kind = NEWEST_NGRAM
            for ngram in window.after(rows.last_token(row)):
                # N-grams are likelier than the window, but the window needs room for new ones.
                if len(draft.tokens) + len(ngram) <= max_nodes // 2:
                    _follow(draft, ROOT, ngram, kind)
                kind = OLDER_NGRAM
            stem = ROOT
            for first, *others in window.levels.T.tolist():
                stem = _follow(draft, stem, (first,), WINDOW)
                _follow(draft, stem, others, WINDOW)
        return DraftTree.from_drafts(drafts)

    def observe(self, step: Step) -> None:
        live = np.flatnonzero(step.verdict.live & ~step.verdict.finished).tolist()
        if not live:
            return
        places = np.array([_last_level(step.draft, row, self._windows[row].levels) for row in live])
        written, asked = np.full(places.shape, -1, np.int64), places > 0
        if asked.any():
            row = np.repeat(live, asked.sum(1))
            written[asked] = step.best_tokens(row, places[asked], np.ones_like(row))[0][:, 0]
        for index, of_row in zip(live, written, strict=True):
            num_new = len(step.verdict.emitted(index))
            self._windows[index].advance(step.rows.context(index), num_new, of_row)

    def end(self, rows: Rows) -> None:
        self._windows = {}


def _follow(draft: RowDraft, node: int, tokens: tuple[int, ...] | list[int], kind: int) -> int:
    for token in tokens:
        depth = min(draft.depth_below(node), DEPTH_CLASSES)
        node = draft.child(node, token, kind * DEPTH_CLASSES + depth - 1)
    return node


def _last_level(draft: DraftTree, row: int, levels: np.ndarray) -> list[int]:
    """Return the place of each column's last node in the row's logits, 0 if it was not verified."""
    places = []
    stem: int | None = ROOT
    for first, *others in levels.T.tolist():
        stem = node = None if stem is None else draft.child_of(row, stem, first)
        for token in others:
            node = None if node is None else draft.child_of(row, node, token)
        places.append(0 if node is None else node + 1)
    return places
