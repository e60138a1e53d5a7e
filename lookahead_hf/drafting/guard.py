"""How far drafts are believed, and when drafting pauses."""

from __future__ import annotations

PATIENCE = 3
"""Steps in a row without a draft worth its cost until drafting rests."""

PRICE = 0.004
"""Part of plain decoding's time that proposing may take while nothing pays."""

LONGEST_REST = 128
"""Most steps until drafting is tried again."""

DOUBTED = 3.0
"""Accepted tokens that drafts may promise before they are doubted by half if they bring none."""

KEPT, FADE = 0.95, 0.98
"""What is left of that memory after a draft and after a plain step."""


class Trust:
    """How far drafts lately kept what they promised.

    Calibration corrects the sources' promises one by one; where a text turns away from all that was
    learned, this sees it sooner.
    """

    def __init__(self) -> None:
        self._promised = 0.0
        self._accepted = 0.0

    @property
    def factor(self) -> float:
        """What a promise is worth: 1 at first and where promises are kept, less where not."""
        return min(1.0, (DOUBTED + self._accepted) / (DOUBTED + self._promised))

    def observe(self, promised: float, accepted: float) -> None:
        """Note a verified draft's expected and actual number of accepted nodes per row."""
        self._promised = KEPT * self._promised + promised
        self._accepted = KEPT * self._accepted + accepted

    def fade(self) -> None:
        """Note a plain step: what lies back counts less."""
        self._promised *= FADE
        self._accepted *= FADE


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
