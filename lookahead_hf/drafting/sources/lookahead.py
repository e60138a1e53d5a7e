"""Drafts from a Jacobi window: the target writes n-grams ahead of its text and uses them later.

Lookahead decoding (Fu et al., arXiv:2402.02057) keeps a window of guessed tokens ahead of the text.
What the target makes of them, step after step, are n-grams that often turn up when the text gets
there. Here the window is part of an ordinary draft tree: its first level is a chain, and what the
target made of each token hangs on that token as a branch. So it needs no mask of its own, the walk
verifies it like any draft, with processors and sampling, and where it is right it is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from lookahead_hf.config import check_int
from lookahead_hf.draft import ROOT, DraftTree, Verdict
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.rows import Rows

if TYPE_CHECKING:
    from lookahead_hf.runner.cuda.transfer import HostCopy, Ticket

DEPTH_CLASSES = 4
"""Depths 1, 2, 3, and beyond."""

NEWEST_NGRAM, OLDER_NGRAM, WINDOW = range(3)
_PRIOR = [0.35, 0.15, 0.08]
"""Kinds of proposals and how often they are accepted before anything was learned."""

_CUT = -2
"""Stands for a node that was not verified; no node has it for a parent."""


class WindowNgrams:
    """The newest n-grams of a row by their first token, each n-gram once.

    A full list drops the n-gram that was seen longest ago.
    """

    def __init__(self, num_kept: int) -> None:
        """Keep so many n-grams per first token."""
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
        """What followed a token, newest first."""
        return self._ngrams.get(token, [])[::-1]


class _RowWindow:
    """A row's window and its n-grams.

    Column i of level j stands 1 + i + j places behind the last token, and comes after the columns
    up to i of level 0 and those above it. From the logits at the last level comes the next one.
    """

    def __init__(
        self, context: np.ndarray, num_columns: int, pool: WindowNgrams, ngram_size: int, seed: int
    ) -> None:
        """Fill the window with pieces of the context and collect its n-grams."""
        self.pool, self._ngram_size = pool, ngram_size
        self._random = np.random.default_rng(seed)
        self.levels = self._pieces(context, num_columns)  # [levels, columns]
        self.collect(context, len(context))

    def collect(self, context: np.ndarray, num_new: int) -> None:
        """Collect the n-grams that the newest tokens of the text end."""
        first = max(0, len(context) - num_new - self._ngram_size + 1)
        tokens = context[first:].tolist()
        for start in range(len(tokens) - self._ngram_size + 1):
            self.pool.add(tokens[start : start + self._ngram_size])

    def advance(self, context: np.ndarray, num_new: int, written: np.ndarray) -> None:
        """Move on behind the text.

        Args:
            context: The text so far, [tokens].
            num_new: Tokens that it gained.
            written: What the target wrote behind each column, -1 where it was not asked, [columns].
        """
        num_columns = len(written)
        was_asked = written >= 0
        for column in np.flatnonzero(was_asked).tolist():
            self.pool.add([*self.levels[:, column].tolist(), int(written[column])])
        shift = num_new
        if was_asked.any():
            self.levels = np.vstack([self.levels[1:], written])
            self.levels[:, ~was_asked] = self._pieces(context, int((~was_asked).sum()))
            shift -= 1  # every level now stands one place further on
        kept = self.levels[:, min(shift, num_columns) :]
        filled = self._pieces(context, num_columns - kept.shape[1])
        self.levels = np.hstack([kept, filled])

    def _pieces(self, context: np.ndarray, count: int) -> np.ndarray:
        """Pieces of the text from anywhere, one per column, [levels, count]."""
        size = self._ngram_size - 1
        if len(context) < size:
            context = np.resize(context, size)
        starts = self._random.integers(0, len(context) - size + 1, count)
        return context[starts[None] + np.arange(size)[:, None]]


class _Comb:
    """One row's draft: every path shares its beginning with those that were there before."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.buckets: list[int] = []
        self._depths: list[int] = []
        self._known: dict[tuple[int, int], int] = {}

    def child(self, parent: int, token: int, kind: int) -> int:
        """The node of a token behind `parent`, a new one if need be."""
        node = self._known.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            depth = 1 if parent == ROOT else self._depths[parent] + 1
            self.tokens.append(token)
            self.parents.append(parent)
            self._depths.append(depth)
            self.buckets.append(kind * DEPTH_CLASSES + min(depth, DEPTH_CLASSES) - 1)
        return node

    def add_ngrams(self, ngrams: Sequence[Sequence[int]], max_nodes: int) -> None:
        """Hang the n-grams of a pool on the last token, as long as they fit."""
        for rank, ngram in enumerate(ngrams):
            if len(self.tokens) + len(ngram) > max_nodes:
                return
            node = ROOT
            for token in ngram:
                node = self.child(node, token, OLDER_NGRAM if rank else NEWEST_NGRAM)

    def add_window(self, levels: list[list[int]]) -> None:
        """Hang a window on the last token: level 0 as a chain, each column's others behind it."""
        stem = ROOT
        for first, *others in zip(*levels, strict=True):
            stem = node = self.child(stem, first, WINDOW)
            for token in others:
                node = self.child(node, token, WINDOW)


class LookaheadDrafter(Drafter):
    """Writes n-grams ahead of the text by Jacobi iteration, in a window of every row's draft.

    A draft has up to `(ngram_size - 1) * (window + num_ngrams)` nodes per row, and the window only
    advances in columns that are verified to their end: with a budget below that it starves, so this
    source is meant to be the only one, with a fixed budget.
    """

    name: ClassVar[str] = "lookahead"

    def __init__(self, *, window: int = 7, ngram_size: int = 5, num_ngrams: int = 7) -> None:
        """Validate the options.

        Args:
            window: Columns of the window, W in the paper.
            ngram_size: Tokens of an n-gram, its first one included; N.
            num_ngrams: N-grams to keep, and to propose, for each first token; G.

        Raises:
            ValueError: An option is out of its range.
        """
        for option, value, least in (
            ("window", window, 1),
            ("ngram_size", ngram_size, 2),
            ("num_ngrams", num_ngrams, 1),
        ):
            check_int(f"lookahead: {option}", value, least, 64)
        self._window, self._ngram_size, self._num_ngrams = window, ngram_size, num_ngrams
        self._rows: list[_RowWindow] = []
        self._logits: torch.Tensor | None = None
        self._likeliest: Ticket | None = None

    @property
    def num_buckets(self) -> int:
        return len(_PRIOR) * DEPTH_CLASSES

    def prior(self) -> np.ndarray:
        return np.repeat(_PRIOR, DEPTH_CLASSES).astype(np.float32)

    def begin(self, rows: Rows) -> None:
        self._rows = [
            _RowWindow(
                rows.context(row),
                self._window,
                WindowNgrams(self._num_ngrams),
                self._ngram_size,
                seed=row,
            )
            for row in range(rows.num_rows)
        ]

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        combs = [_Comb() for _ in self._rows]
        for row in np.flatnonzero(rows.live).tolist():
            # They are likelier than the window, which needs room to bring forth new ones.
            ngrams = self._rows[row].pool.after(rows.last_token(row))
            combs[row].add_ngrams(ngrams, max_nodes // 2)
            combs[row].add_window(self._rows[row].levels.tolist())
        tree = DraftTree.from_rows((comb.tokens, comb.parents) for comb in combs)
        return tree.with_buckets(np.array([b for comb in combs for b in comb.buckets], np.int32))

    def prepare(self, logits: torch.Tensor) -> None:
        self._logits, self._likeliest = logits, None

    def bring(self, copy: HostCopy) -> None:
        assert self._logits is not None, "prepare() comes first"
        self._likeliest = copy.add(self._logits.argmax(-1))

    def observe(self, rows: Rows, draft: DraftTree, verdict: Verdict, logits: torch.Tensor) -> None:
        brought, self._logits, self._likeliest = self._likeliest, None, None
        live = np.flatnonzero(verdict.live & ~verdict.finished).tolist()
        if not live:
            return
        places = np.array(
            [_last_level(draft, row, self._rows[row].levels.tolist()) for row in live]
        )
        written = np.full(places.shape, -1, np.int64)
        row, place = np.repeat(live, (places > 0).sum(1)), places[places > 0]
        written[places > 0] = (
            _likeliest(logits, row, place) if brought is None else brought.take()[row, place]
        )
        for index, of_row in zip(live, written, strict=True):
            num_new = len(verdict.emitted(index))
            self._rows[index].advance(rows.context(index), num_new, of_row)
            self._rows[index].collect(rows.context(index), num_new)

    def end(self, rows: Rows) -> None:
        self._rows = []
        self._logits = self._likeliest = None


def _last_level(draft: DraftTree, row: int, levels: list[list[int]]) -> list[int]:
    """Place in the row's logits of each column's last node, 0 where it was not verified."""
    nodes = draft.row(row)
    parents, tokens = draft.parents[nodes].tolist(), draft.token_ids[nodes].tolist()
    known = {(p, t): node for node, (p, t) in enumerate(zip(parents, tokens, strict=True))}
    places = []
    stem = ROOT
    for first, *others in zip(*levels, strict=True):
        stem = node = known.get((stem, first), _CUT)
        for token in others:
            node = known.get((node, token), _CUT)
        places.append(node + 1 if node != _CUT else 0)
    return places


def _likeliest(logits: torch.Tensor, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The likeliest token after each of some places, of logits [rows, width, vocab]."""
    if logits.device.type == "cpu":  # numpy takes 5 us for 49,152 entries, torch 60
        at = zip(rows.tolist(), places.tolist(), strict=True)
        return np.array([logits[r, p].float().numpy().argmax() for r, p in at], np.int64)
    on_device = torch.from_numpy(np.stack([rows, places])).to(logits.device)
    return logits[on_device[0], on_device[1]].argmax(-1).cpu().numpy()
