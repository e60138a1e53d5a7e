"""The questions that drafting asks of a grammar."""

from __future__ import annotations

import time

from lookahead_hf.logits.grammars.protocol import Grammar

_STRUCTURE = [bytes([char]) for char in b':,"}]{[']
_MOST_ALLOWED = 64


MOST_SECONDS = 0.5
"""Most time of the processor for one step of a row. An answer takes as long as the text is that a
grammar forces, which may have any length."""


class Probe:
    """A `Grammar` at some node of a draft, with the number of `operations` so far in a step.

    Every operation raises a TimeoutError if the earlier ones have taken too long.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.operations = 0
        self._end = time.thread_time() + MOST_SECONDS

    def _count(self) -> None:
        self.operations += 1
        if time.thread_time() > self._end:
            raise TimeoutError(f"it takes more than {MOST_SECONDS} s per step")

    def advance(self, token: int) -> bool:
        self._count()
        return self.grammar.advance(token)

    def advance_text(self, text: bytes) -> int:
        self._count()
        return self.grammar.advance_text(text)

    def back(self, steps: int) -> None:
        self.operations += steps > 0
        self.grammar.back(steps)

    def forced_tokens(self, limit: int) -> list[int]:
        """Return at most `limit` tokens that are certain."""
        self._count()
        return self.grammar.forced_tokens()[:limit]

    def forced_text(self, limit: int) -> bytes:
        """Return at most `limit` bytes that are certain, without half a character at the end."""
        self._count()
        return self.grammar.forced_text()[:limit].decode("utf-8", "ignore").encode()

    def few_allowed(self) -> list[int] | None:
        """Return the allowed tokens, None if there are many."""
        self._count()
        return self.grammar.allowed(_MOST_ALLOWED)

    def allows(self, text: bytes) -> bool:
        steps = self.advance_text(text)
        self.back(steps)
        return steps > 0

    def is_free(self) -> bool:
        """Return whether a character may follow that only strings and free text hold."""
        return self.allows(b"~")

    def is_number(self) -> bool:
        return self.allows(b"0")

    def only_structure(self) -> bytes:
        """Return the only structural character that may follow, b"" if unsure."""
        if self.is_free() or self.is_number():
            return b""
        possible = [char for char in _STRUCTURE if self.allows(char)]
        return possible[0] if len(possible) == 1 else b""
