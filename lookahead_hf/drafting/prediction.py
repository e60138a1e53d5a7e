"""Drafts from the caller's guess of the whole answer, found again after every edit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.steps import ROOT, DraftTree, Evidence, Verdict

if TYPE_CHECKING:
    import torch

    from lookahead_hf.rows import Rows

# How a place in the prediction was come by. FOUND counts on: two for each class of match lengths,
# the first of them near the place where the text left the prediction (one token that matches far
# from it says nothing and is passed over).
HEAD, INSERTED, REPLACED, FOUND = 0, 1, 2, 3
FOUND_LENGTHS = np.array([1, 2, 4, 8])
NUM_ORIGINS = FOUND + 2 * len(FOUND_LENGTHS)
# Classes of the number of tokens in a row that were right since then.
RIGHT_LENGTHS = np.array([0, 1, 2, 4, 8, 16])
NUM_RIGHT = len(RIGHT_LENGTHS)
NUM_BUCKETS = NUM_ORIGINS * NUM_RIGHT

NEAR = (-8, 64)
"""Tokens before and after the place where the text left the prediction."""

TRUSTED = 8
"""Tokens in a row after which no other place is looked for."""

MAX_PLACES = 4
MAX_MATCH = 16
"""Last tokens of the text that are compared to find the place again."""

MAX_GUESSES = 4
"""Tokens after leaving the prediction for which the place is guessed."""

MIN_SCORE = 1e-3

# Measured on edited source files: acceptance rate of the first token of each origin, and of later
# tokens by the class of right tokens before them (never lower than the first one's).
FIRST_RATES = (0.9, 0.2, 0.05, 0.15, 0.02, 0.5, 0.2, 0.7, 0.35, 0.9, 0.6)
LATER_RATES = (0.0, 0.75, 0.92, 0.96, 0.98, 0.99)

_FROM_ROOT = np.array([ROOT])
_RIGHT_CLASS = np.searchsorted(RIGHT_LENGTHS, np.arange(RIGHT_LENGTHS[-1] + 1), "right") - 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the prediction the text may be: its next token is predicted at `pointer`."""

    pointer: int
    origin: int
    right: int = 0


class Follower:
    """Follows one row through its prediction.

    Attributes:
        places: Where the text may be, the likeliest first.
    """

    def __init__(self, prediction: np.ndarray) -> None:  # [length]
        self._prediction = prediction
        self._left_at = 0  # where the text left the prediction,
        self._since = 0  # and tokens that it has emitted since
        self.places = [Place(0, HEAD)]

    def follow(self, text: np.ndarray, num_new: int, rates: np.ndarray) -> None:
        """Move on by the last `num_new` tokens of `text`, all that the row has emitted so far.

        `rates` [origins, classes of right tokens] order the places.
        """
        new = text[len(text) - num_new :]
        right = [self._num_right(place.pointer, new) for place in self.places]
        alive = [
            Place(place.pointer + num_new, place.origin, place.right + num_new)
            for place, count in zip(self.places, right, strict=True)
            if count == num_new
        ]
        if alive:
            longest = max(alive, key=lambda place: place.right)
            self._left_at, self._since = longest.pointer, 0
            if longest.right >= TRUSTED:
                self.places = [longest]
                return
        else:
            self._leave(right, num_new)
        known = {place.pointer: place for place in [*self._guesses(), *self._found(text), *alive]}
        places = sorted(known.values(), key=lambda place: self._rank(place, rates))
        self.places = places[:MAX_PLACES]

    def _num_right(self, pointer: int, new: np.ndarray) -> int:
        """Tokens of `new` that are predicted at `pointer`, up to the first that is not."""
        expected = self._prediction[pointer : pointer + len(new)]
        wrong = np.flatnonzero(expected != new[: len(expected)])
        return int(wrong[0]) if len(wrong) else len(expected)

    def _leave(self, right: list[int], num_new: int) -> None:
        """Note where the text left the prediction, from the likeliest place that held."""
        for place, count in zip(self.places, right, strict=True):
            if place.right + count > 0:
                self._left_at = place.pointer + count
                self._since = num_new - count
                return
        self._since += num_new

    def _rank(self, place: Place, rates: np.ndarray) -> tuple[float, int]:
        rate = rates[place.origin, _RIGHT_CLASS[min(place.right, RIGHT_LENGTHS[-1])]]
        return -float(rate), abs(place.pointer - self._left_at)

    def _guesses(self) -> list[Place]:
        """Where the prediction goes on if tokens were put in, or put in for its next one."""
        if not 0 < self._since <= MAX_GUESSES:
            return []
        return [Place(self._left_at, INSERTED), Place(self._left_at + 1, REPLACED)]

    def _found(self, text: np.ndarray) -> list[Place]:
        """Places that the text's last tokens speak for, long matches and near ones first."""
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
        """Places after the text's last token, and how many of its last tokens stand before each."""
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
        """Tokens predicted from a place on, at most `most`, and their buckets."""
        tokens = self._prediction[place.pointer : place.pointer + most]
        right = np.minimum(np.arange(place.right, place.right + len(tokens)), RIGHT_LENGTHS[-1])
        return tokens, place.origin * NUM_RIGHT + _RIGHT_CLASS[right]


class PredictionDrafter(Drafter):
    """Proposes what the caller predicted: one chain while the prediction holds, after an edit one
    from each place where the text may have come back to it."""

    name: ClassVar[str] = "prediction"

    def __init__(self, predictions: Sequence[np.ndarray]) -> None:
        """Take the predictions.

        Args:
            predictions: Token ids of the answers, [length] each: one per row, or per prompt where
                every prompt has several rows, one after another.

        Raises:
            ValueError: There is none.
        """
        if not len(predictions):
            raise ValueError("predictions is empty: give one array of token ids per row")
        self._predictions = [np.asarray(prediction, np.int64) for prediction in predictions]
        self._followers: list[Follower] = []
        self.rates = self.prior()

    @property
    def num_buckets(self) -> int:
        return NUM_BUCKETS

    def prior(self) -> np.ndarray:
        return np.maximum.outer(FIRST_RATES, LATER_RATES).astype(np.float32).ravel()

    def begin(self, rows: Rows) -> None:
        each, rest = divmod(rows.num_rows, len(self._predictions))
        if rest:
            raise ValueError(
                f"{len(self._predictions)} predictions were given for {rows.num_rows} rows: give "
                "one for each row, or one for all"
            )
        self._followers = [Follower(ids) for ids in self._predictions for _ in range(each)]
        for row in range(rows.num_rows):
            self._follow(rows, row, int(rows.num_emitted[row]))

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        parts: list[_Part] = []
        sizes = np.zeros(rows.num_rows + 1, np.int64)
        for row in np.flatnonzero(rows.live).tolist():
            follower = self._followers[row]
            chains = [follower.chain(place, max_nodes) for place in follower.places]
            branches = _branches(_likeliest(chains, max_nodes, self.rates))
            sizes[row + 1] = sum(len(branch.token_ids) for branch in branches)
            parts += branches
        return _joined(parts, sizes.cumsum()) if parts else DraftTree.empty(rows.num_rows)

    def observe(self, rows: Rows, draft: DraftTree, verdict: Verdict, logits: torch.Tensor) -> None:
        for row in np.flatnonzero(verdict.num_emitted).tolist():
            self._follow(rows, row, int(verdict.num_emitted[row]))

    def end(self, rows: Rows) -> None:
        self._followers = []

    def _follow(self, rows: Rows, row: int, num_new: int) -> None:
        rates = self.rates.reshape(NUM_ORIGINS, NUM_RIGHT)
        self._followers[row].follow(rows.emitted(row), num_new, rates)


class _Part(NamedTuple):
    """Nodes of a row that hang one on the other."""

    token_ids: np.ndarray
    parents: np.ndarray
    depth: np.ndarray
    bucket: np.ndarray
    score: np.ndarray


_Chain = tuple[np.ndarray, np.ndarray, np.ndarray]  # token ids, buckets and scores, [length] each


def _likeliest(
    chains: list[tuple[np.ndarray, np.ndarray]],  # token ids and buckets, [length] each
    max_nodes: int,
    rates: np.ndarray,  # [NUM_BUCKETS]
) -> list[_Chain]:
    """The chains, cut to their `max_nodes` likeliest tokens taken together."""
    scores = [np.cumprod(rates[buckets]) for _, buckets in chains]
    every = np.concatenate(scores) if scores else np.empty(0)
    owner = np.repeat(np.arange(len(scores)), [len(score) for score in scores])
    best = np.argsort(-every, kind="stable")[:max_nodes]
    sizes = np.bincount(owner[best[every[best] >= MIN_SCORE]], minlength=len(chains)).tolist()
    return [
        (tokens[:size], buckets[:size], score[:size])
        for (tokens, buckets), score, size in zip(chains, scores, sizes, strict=True)
        if size
    ]


def _branches(chains: list[_Chain]) -> list[_Part]:
    """The chains as one tree: each hangs where it leaves the one with which it shares most."""
    parts: list[_Part] = []
    placed: list[tuple[np.ndarray, np.ndarray]] = []
    count = 0
    for tokens, buckets, score in chains:
        stem = max((_stem(tokens, *other) for other in placed), key=len, default=_FROM_ROOT)
        shared = len(stem) - 1
        depth = np.arange(shared, len(tokens)) + 1
        nodes = np.concatenate([stem, np.arange(count, count + len(depth))])
        parts.append(
            _Part(tokens[shared:], nodes[shared:-1], depth, buckets[shared:], score[shared:])
        )
        placed.append((tokens, nodes))
        count += len(depth)
    return parts


def _stem(tokens: np.ndarray, other: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """The nodes, ROOT first, that another chain has for the tokens with which both begin."""
    length = min(len(tokens), len(other))
    differs = np.flatnonzero(tokens[:length] != other[:length])
    return nodes[: 1 + (int(differs[0]) if len(differs) else length)]


def _joined(parts: list[_Part], row_offsets: np.ndarray) -> DraftTree:
    """The tree of all rows, every node with its bucket as its evidence."""
    token_ids, parents, depth, bucket, score = (
        np.concatenate(field) for field in zip(*parts, strict=True)
    )
    num_nodes = len(token_ids)
    return DraftTree(
        row_offsets,
        token_ids,
        parents.astype(np.int32),
        depth.astype(np.int32),
        score,
        Evidence(np.arange(num_nodes + 1), np.zeros(num_nodes, np.int32), bucket.astype(np.int32)),
    )
