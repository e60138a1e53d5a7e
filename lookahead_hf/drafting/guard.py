"""When drafting pauses, and how sure it must be after it was slower than plain decoding."""

from __future__ import annotations

from lookahead_hf.steps import Verdict

PATIENCE = 3
"""Steps in a row without a draft worth its cost until drafting rests."""

PRICE = 0.004
"""Part of plain decoding's time that proposing may take while nothing pays."""

LONGEST_REST = 128
"""Most steps until drafting is tried again."""

FADE = 0.97
"""What is left per plain step of the memory of drafts that were slower."""


class Pace:
    """Tokens per second of the latest drafted steps beside what plain steps would have made."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = self._seconds = 0.0
        self._plain_tokens = self._plain_seconds = 0.0

    def observe(self, verdict: Verdict, seconds: float, plain_seconds: float) -> None:
        """Note a drafted step and how long a plain one takes."""
        self._weight = 0.9 * self._weight + 1.0
        self._tokens = 0.9 * self._tokens + len(verdict.token_ids)
        self._seconds = 0.9 * self._seconds + seconds
        self._plain_tokens = 0.9 * self._plain_tokens + int(verdict.live.sum())
        self._plain_seconds = 0.9 * self._plain_seconds + plain_seconds

    def fade(self) -> None:
        """Note a plain step: what lies back counts less."""
        self._weight *= FADE

    @property
    def is_behind(self) -> bool:
        """Whether enough steps were seen lately and plain ones would have been faster."""
        slower = self._tokens * self._plain_seconds < self._plain_tokens * self._seconds
        return self._weight >= 4.5 and slower


class Rest:
    """Steps without a proposal: the more of them, the longer nothing pays and the dearer it is."""

    def __init__(self) -> None:
        self._left = 0
        self._length = 0
        self._misses = 0

    @property
    def is_resting(self) -> bool:
        """Whether nothing is to be proposed now."""
        return self._left > 0

    def note_offer(self, pays: bool, price: float) -> None:
        """Note whether a draft looked worth its cost.

        Args:
            pays: Whether it did.
            price: Proposing's part of a plain step's time.
        """
        if pays:
            self._misses = self._length = 0
            return
        self._misses += 1
        if self._misses >= PATIENCE:
            longest = min(LONGEST_REST, round(price / PRICE) - 1)
            self._length = max(0, min(max(1, 2 * self._length), longest))
            self._left = self._length

    def step(self) -> None:
        """Count a step without a proposal."""
        self._left = max(0, self._left - 1)
