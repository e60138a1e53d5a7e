"""The questions that drafting asks of a grammar."""

from __future__ import annotations

from lookahead_hf.logits.grammars.protocol import Grammar

_STRUCTURE = [bytes([char]) for char in b':,"}]{[']
_MOST_ALLOWED = 64


class Probe:
    """A `Grammar` at some node of a draft, with the number of `operations` so far."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.operations = 0

    def advance(self, token: int) -> bool:
        self.operations += 1
        return self.grammar.advance(token)

    def advance_text(self, text: bytes) -> int:
        self.operations += 1
        return self.grammar.advance_text(text)

    def back(self, steps: int) -> None:
        self.operations += steps > 0
        self.grammar.back(steps)

    def forced_tokens(self) -> list[int]:
        self.operations += 1
        return self.grammar.forced_tokens()

    def forced_text(self) -> bytes:
        """Return the text that is certain, without half a character at its end."""
        self.operations += 1
        return self.grammar.forced_text().decode("utf-8", "ignore").encode()

    def few_allowed(self) -> list[int] | None:
        """Return the allowed tokens, None if there are many."""
        self.operations += 1
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
