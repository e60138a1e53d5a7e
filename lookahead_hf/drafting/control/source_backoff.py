"""Pauses sources that take more time than they save."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

KEPT = 0.98
"""Share of a source's loss that a step leaves; what costs less than 3 % of a step never rests."""

DEBT, CREDIT = 1.5, 4.0
"""Loss, in steps' time, at which a source is paused; gain that it can save up."""

PRICE = 0.004
"""Share of the time that retries of a paused source may take."""


class SourceBackoff:
    """Decides for every step which sources are `asked`.

    A source is worth asking while its share of the tokens is at least its share of the time. Only
    accepted tokens that no other source proposed count for it. A source that loses too much is
    paused. The pause grows with its cost and with each failed retry. Sources are paused one at a
    time, since a pause changes what the others gain.
    """

    def __init__(self, num_sources: int, may_rest: bool) -> None:
        """Ask every source at first, and always unless they `may_rest`."""
        self._may_rest = may_rest
        self._lost = [0.0] * num_sources  # in steps' worth of time
        self._left = [0] * num_sources  # steps to rest
        self._length = [0] * num_sources  # of the latest rest
        self._num_tokens = 0.0
        self.asked, self._skips = [True] * num_sources, False

    @property
    def next_asked(self) -> list[bool]:
        """Sources that the next step would ask; none if this one skips all on purpose."""
        return [left == 0 and not self._skips for left in self._left]

    def begin_step(self) -> bool:
        """Decide which sources the new step asks; return whether any is."""
        self._skips = False
        self.asked = self.next_asked
        self._left = [max(0, left - 1) for left in self._left]
        return any(self.asked)

    def skip_step(self) -> None:
        self.asked, self._skips = [False] * len(self._left), True

    def observe(
        self, seconds: Sequence[float], alone: Sequence[int], num_tokens: int, step_seconds: float
    ) -> None:
        """Learn from a step that took `step_seconds` without drafting.

        `seconds` is the time of each source, `alone` the accepted tokens that only it proposed.
        """
        if not (self._may_rest and num_tokens and step_seconds and any(self.asked)):
            return
        mean = self._num_tokens or num_tokens
        self._num_tokens = 0.9 * mean + 0.1 * num_tokens
        worth = (1.0 + sum(seconds) / step_seconds) / self._num_tokens  # of a token, in steps
        debtors = []
        for index in np.flatnonzero(self.asked).tolist():
            price = seconds[index] / step_seconds
            lost = KEPT * self._lost[index] + price - worth * alone[index]
            self._lost[index] = min(max(lost, -CREDIT), DEBT)
            if lost < DEBT:
                self._length[index] = 0
            else:
                debtors.append((price, index))
        if debtors:
            self._rest(*max(debtors))

    def _rest(self, price: float, debtor: int) -> None:
        longest = max(1, round(price / PRICE))
        self._length[debtor] = self._left[debtor] = min(max(1, 2 * self._length[debtor]), longest)
