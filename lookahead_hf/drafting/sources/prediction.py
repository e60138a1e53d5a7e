"""Drafts from the text that the caller expects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lookahead_hf.draft import ROOT, DraftTree, RowDraft
from lookahead_hf.drafting.drafter import Drafter, Traits
from lookahead_hf.rows import Rows

# How a place in the prediction was found. There are two origins from FOUND on for each class of
# match lengths: matches near the place where the text left the prediction, and far from it (a
# single matching token far from it means nothing and is left out).
HEAD, INSERTED, REPLACED, FOUND = 0, 1, 2, 3
FOUND_LENGTHS = np.array([1, 2, 4, 8])
NUM_ORIGINS = FOUND + 2 * len(FOUND_LENGTHS)
# Classes of the number of consecutive tokens that were right since then.
RIGHT_LENGTHS = np.array([0, 1, 2, 4, 8, 16])
NUM_RIGHT = len(RIGHT_LENGTHS)
NUM_BUCKETS = NUM_ORIGINS * NUM_RIGHT

NEAR = (-8, 64)  # Tokens around the place where the text left the prediction that count as near it
TRUSTED = 8  # Consecutive right tokens after which no other place is searched

MAX_PLACES = 4
MAX_MATCH = 16  # The text's last tokens that are compared to find the place again
MAX_GUESSES = 4  # Tokens after leaving the prediction for which the place is guessed
SURE = 2  # Consecutive right tokens after which the text counts as back in the prediction
MAX_RENAMED = 8  # Most tokens of a name

# Measured on edited source files: acceptance rate of the first token of each origin, and of later
# tokens by the class of right tokens before them (never lower than the first one's).
FIRST_RATES = (0.9, 0.2, 0.05, 0.15, 0.02, 0.5, 0.2, 0.7, 0.35, 0.9, 0.6)
LATER_RATES = (0.0, 0.75, 0.92, 0.96, 0.98, 0.99)

_RIGHT_CLASS = np.searchsorted(RIGHT_LENGTHS, np.arange(RIGHT_LENGTHS[-1] + 1), "right") - 1


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the prediction where the text may be; `pointer` is its next token."""

    pointer: int
    origin: int
    right: int = 0


class Alignment:
    """Aligns one row with its prediction; `places`, likeliest first, are where the text may be."""

    def __init__(self, prediction: np.ndarray) -> None:  # [length]
        self._prediction = prediction
        self._num_followed = 0
        self._left_at = 0  # where the text left the prediction
        self._since = 0  # tokens emitted since then
        self._gap: tuple[int, int] | None = None  # both, kept until the text is surely back
        self._replaced: set[tuple[tuple[int, ...], ...]] = set()
        self.places = [Place(0, HEAD)]

    def follow(self, text: np.ndarray, rates: np.ndarray) -> None:
        """Move on to the end of `text`, all that the row has emitted.

        `rates`, [origins, classes of right tokens], order the places.
        """
        while self._num_followed < len(text):
            # A text that others drafted may leave the prediction and come back several times.
            new = text[self._num_followed :]
            right = max((self._num_right(place.pointer, new) for place in self.places), default=0)
            num_new = min(right + 1, len(new))
            self._num_followed += num_new
            self._move(text[: self._num_followed], num_new, rates)

    def _move(self, text: np.ndarray, num_new: int, rates: np.ndarray) -> None:
        """Move on by the last `num_new` tokens of `text`; only the last may be unpredicted."""
        new = text[len(text) - num_new :]
        alive = self._alive(new)
        if not alive:
            held = self._leave(new)
            back = len(text) - self._since  # up to here the text was predicted
            if held is not None and self._is_renaming(held, text[:back]):
                self.places = [held]
                alive = self._alive(text[back:])
            if not alive:
                self._gap = self._gap or (self._left_at, back)
        if alive:
            longest = max(alive, key=lambda place: place.right)
            self._left_at, self._since = longest.pointer, 0
            if self._is_renaming(longest, text) or longest.right >= TRUSTED:
                self.places = [longest]
                return
        known = {place.pointer: place for place in [*self._guesses(), *self._found(text), *alive]}
        places = sorted(known.values(), key=lambda place: self._rank(place, rates))
        self.places = places[:MAX_PLACES]

    def _alive(self, new: np.ndarray) -> list[Place]:
        return [
            Place(place.pointer + len(new), place.origin, place.right + len(new))
            for place in self.places
            if self._num_right(place.pointer, new) == len(new)
        ]

    def _num_right(self, pointer: int, new: np.ndarray) -> int:
        """Count the tokens of `new` that the prediction has at `pointer`, up to a wrong one."""
        expected = self._prediction[pointer : pointer + len(new)]
        wrong = np.flatnonzero(expected != new[: len(expected)])
        return int(wrong[0]) if len(wrong) else len(expected)

    def _leave(self, new: np.ndarray) -> Place | None:
        """Note where the text left the prediction: at the end of the likeliest right place."""
        for place in self.places:
            count = self._num_right(place.pointer, new)
            if place.right + count > 0:
                self._left_at = place.pointer + count
                self._since = len(new) - count
                return Place(self._left_at, place.origin, place.right + count)
        self._since += len(new)
        return None

    def _is_renaming(self, place: Place, text: np.ndarray) -> bool:
        """Learn what replaced a part of the prediction, once the text is back at `place`.

        A part that the same tokens replaced twice is taken for a name, and replaced from here on.
        """
        if self._gap is None or place.right < SURE:
            return False
        (pointer, start), self._gap = self._gap, None
        old = self._prediction[pointer : place.pointer - place.right].tolist()
        new = text[start : len(text) - place.right].tolist()
        while old and new and old[-1] == new[-1]:
            old.pop()
            new.pop()
        if not (0 < len(old) <= MAX_RENAMED and 0 < len(new) <= MAX_RENAMED):
            return False
        names = (tuple(old), tuple(new))
        is_second = names in self._replaced
        self._replaced.add(names)
        if is_second:
            rest = _replace(self._prediction[place.pointer :].tolist(), old, new)
            self._prediction = np.array([*self._prediction[: place.pointer], *rest], np.int64)
        return is_second

    def _rank(self, place: Place, rates: np.ndarray) -> tuple[float, int]:
        rate = rates[place.origin, _RIGHT_CLASS[min(place.right, RIGHT_LENGTHS[-1])]]
        return -float(rate), abs(place.pointer - self._left_at)

    def _guesses(self) -> list[Place]:
        """Return the places if the text inserted tokens or replaced the next token."""
        if not 0 < self._since <= MAX_GUESSES:
            return []
        return [Place(self._left_at, INSERTED), Place(self._left_at + 1, REPLACED)]

    def _found(self, text: np.ndarray) -> list[Place]:
        """Return the places after matches of the text's last tokens, long and near ones first."""
        pointers, match_len = self._matches(text)
        ahead = pointers - self._left_at
        far = (ahead < NEAR[0]) | (ahead > NEAR[1])
        kept = np.flatnonzero((match_len > 1) | ~far)
        length_class = np.searchsorted(FOUND_LENGTHS, match_len[kept], "right") - 1
        distance = np.where(ahead < 0, -2 * ahead, ahead)[kept]
        best = np.lexsort((distance, far[kept], -length_class))[:MAX_PLACES]
        origins = FOUND + 2 * length_class[best] + far[kept][best]
        chosen = zip(pointers[kept][best].tolist(), origins.tolist(), strict=True)
        return [Place(pointer, origin) for pointer, origin in chosen]

    def _matches(self, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places after the text's last token, and the match length before each."""
        pointers = np.flatnonzero(self._prediction[:-1] == text[-1]) + 1
        match_len = np.ones(len(pointers), np.int64)
        equal = np.arange(len(pointers))
        for back in range(2, min(MAX_MATCH, len(text)) + 1):
            equal = equal[pointers[equal] >= back]
            equal = equal[self._prediction[pointers[equal] - back] == text[-back]]
            if not len(equal):
                break
            match_len[equal] = back
        return pointers, match_len

    def chain(self, place: Place, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Return at most `most` predicted tokens from a place on, and their buckets."""
        tokens = self._prediction[place.pointer : place.pointer + most]
        right = np.minimum(np.arange(place.right, place.right + len(tokens)), RIGHT_LENGTHS[-1])
        return tokens, place.origin * NUM_RIGHT + _RIGHT_CLASS[right]


def _replace(tokens: list[int], old: list[int], new: list[int]) -> list[int]:
    replaced: list[int] = []
    at = 0
    while at < len(tokens):
        is_here = tokens[at : at + len(old)] == old
        replaced += new if is_here else tokens[at : at + 1]
        at += len(old) if is_here else 1
    return replaced


MIN_SCORE = 1e-3


class PredictionDrafter(Drafter):
    """Proposes what the caller predicted; after an edit, from each place where it may go on."""

    name: ClassVar[str] = "prediction"
    traits = Traits(NUM_BUCKETS, np.maximum.outer(FIRST_RATES, LATER_RATES).ravel())

    def __init__(self, predictions: Sequence[np.ndarray]) -> None:
        """Take the ids of the answers, [length] each: one per row, or one per prompt's rows."""
        self._predictions = [np.asarray(prediction, np.int64) for prediction in predictions]
        self._alignments: list[Alignment] = []

    def begin(self, rows: Rows) -> None:
        each = rows.num_rows // len(self._predictions)
        self._alignments = [Alignment(ids) for ids in self._predictions for _ in range(each)]

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        drafts = [RowDraft() for _ in range(rows.num_rows)]
        rates = self.rates.reshape(NUM_ORIGINS, NUM_RIGHT)
        for row in np.flatnonzero(rows.live).tolist():
            alignment = self._alignments[row]
            alignment.follow(rows.emitted(row), rates)
            for place in alignment.places:
                tokens, buckets = alignment.chain(place, max_nodes)
                scores = self.rates[buckets].cumprod()
                node = ROOT
                chain = zip(tokens.tolist(), buckets.tolist(), scores.tolist(), strict=True)
                for token, bucket, score in chain:
                    if score < MIN_SCORE:
                        break
                    node = drafts[row].child(node, token, bucket, score)
        return DraftTree.from_drafts(drafts)

    def end(self, rows: Rows) -> None:
        self._alignments = []
