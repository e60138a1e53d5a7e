"""Which sources are asked: one that takes more time than it brings rests, and the others go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lookahead_hf.drafting.guard import Rest

KEPT = 0.98
"""What is left of a source's loss after a step: what costs less than 3 % of one never rests."""

DEBT = 1.5
"""Steps' worth of time that a source may have lost before it rests."""

LEEWAY = 0.25
"""And what it may have lost beyond that, so that a trial which pays ends its rests."""

CREDIT = 4.0
"""Steps' worth of time that count for a source which brought more than it took."""

SMOOTHED = 0.9
"""Part of the mean tokens per step that one more step leaves."""


class Roster:
    """Decides for every step which sources are asked.

    A source is worth asking where its share of the tokens is no smaller than its share of the time.
    Counted as its are accepted tokens that no other source proposed: the others would have come
    without it. What a source loses so is added up in seconds, and one that lost too much rests for
    some steps, the longer the more often it was tried again in vain and the dearer it is. One at a
    time begins to rest, since what is left to the others changes with that, and never the last.

    Attributes:
        asked: The sources that are asked in this step.
    """

    def __init__(self, num_sources: int, may_rest: bool) -> None:
        """Ask so many sources, all of them always where none may rest."""
        self._may_rest = may_rest
        self._rests = [Rest() for _ in range(num_sources)]
        self._lost = [0.0] * num_sources
        self._spent = [_Typical() for _ in range(num_sources)]
        self._others, self._step = _Typical(), _Typical()
        self._num_tokens = 0.0
        self.asked = [True] * num_sources

    def begin_step(self, wanted: bool) -> None:
        """Decide who is asked in the step that begins; nobody where no draft is wanted."""
        self.asked = [wanted and not rest.is_resting for rest in self._rests]
        for rest in self._rests:
            rest.step()

    @property
    def next_asked(self) -> list[bool]:
        """Who would be asked in the step after this one."""
        return [not rest.is_resting for rest in self._rests]

    @property
    def seconds(self) -> float:
        """What drafting is expected to take in the next step, in which a draft is wanted."""
        return self._seconds(self.next_asked)

    def _seconds(self, asked: Sequence[bool]) -> float:
        spent = (each.value for each, is_asked in zip(self._spent, asked, strict=True) if is_asked)
        return self._others.value + sum(spent)

    def observe(
        self,
        seconds: Sequence[float],
        alone: Sequence[int],
        others: float,
        num_tokens: int,
        step_seconds: float,
    ) -> None:
        """Learn from a step.

        Args:
            seconds: What each source took.
            alone: Accepted tokens that no source but this one proposed.
            others: What drafting took beside the sources.
            num_tokens: Tokens that the step emitted.
            step_seconds: Time of the step without drafting.
        """
        if not any(self.asked):
            return
        self._others.note(others)
        self._step.note(step_seconds)
        mean = self._num_tokens or num_tokens
        self._num_tokens = SMOOTHED * mean + (1.0 - SMOOTHED) * num_tokens
        for spent, took, asked in zip(self._spent, seconds, self.asked, strict=True):
            if asked:
                spent.note(took)
        if self._may_rest and self._num_tokens:
            self._settle(alone)

    def _settle(self, alone: Sequence[int]) -> None:
        """Charge every source that was asked, and let the worst debtor rest."""
        step = self._step.value
        of_token = (step + self._seconds(self.asked)) / self._num_tokens
        asked = [index for index, is_asked in enumerate(self.asked) if is_asked]
        debtors = []
        for index in asked:
            lost = KEPT * self._lost[index] + self._spent[index].value - alone[index] * of_token
            self._lost[index] = min(max(lost, -CREDIT * step), (DEBT + LEEWAY) * step)
            if lost > DEBT * step:
                debtors.append(index)
            else:
                self._rests[index].note_offer(True, 0.0)
        if debtors and len(asked) > 1:
            self._rest(max(debtors, key=lambda index: self._lost[index]))

    def _rest(self, debtor: int) -> None:
        rest, price = self._rests[debtor], self._spent[debtor].value / self._step.value
        rest.note_offer(False, price)
        if rest.is_resting:
            others = (index for index in range(len(self._lost)) if index != debtor)
            for index in others:
                self._lost[index] = min(self._lost[index], 0.0)


class _Typical:
    """The median of the latest durations, 0 before the first: what disturbs one does not count."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=9)
        self.value = 0.0

    def note(self, seconds: float) -> None:
        self._latest.append(seconds)
        self.value = sorted(self._latest)[(len(self._latest) - 1) // 2]
