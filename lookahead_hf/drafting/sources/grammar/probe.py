"""The questions that drafting asks of a grammar."""

from __future__ import annotations

from lookahead_hf.logits.grammars.protocol import Grammar

_STRUCTURE = [bytes([char]) for char in b':,"}]{[']
_MOST_ALLOWED = 64


class Probe:
    """The state of a grammar at some node of a draft.

    Attributes:
        operations: Questions asked so far.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.operations = 0

    def advance(self, token: int) -> bool:
        """Go over a token; see `Grammar.advance`."""
        self.operations += 1
        return self.grammar.advance(token)

    def advance_text(self, text: bytes) -> int:
        """Go over a text; see `Grammar.advance_text`."""
        self.operations += 1
        return self.grammar.advance_text(text)

    def back(self, steps: int) -> None:
        """Undo the latest steps."""
        self.operations += steps > 0
        self.grammar.back(steps)

    def forced_tokens(self) -> list[int]:
        """The tokens that are certain; see `Grammar.forced_tokens`."""
        self.operations += 1
        return self.grammar.forced_tokens()

    def forced_text(self) -> bytes:
        """The text that is certain, without half a character at its end."""
        self.operations += 1
        return self.grammar.forced_text().decode("utf-8", "ignore").encode()

    def few_allowed(self) -> list[int] | None:
        """The allowed tokens, None if there are many."""
        self.operations += 1
        return self.grammar.allowed(_MOST_ALLOWED)

    def allows(self, text: bytes) -> bool:
        """Whether a text may follow."""
        steps = self.advance_text(text)
        self.back(steps)
        return steps > 0

    def is_free(self) -> bool:
        """Whether a character may follow that only strings and free text hold."""
        return self.allows(b"~")

    def is_number(self) -> bool:
        """Whether a digit may follow."""
        return self.allows(b"0")

    def only_structure(self) -> bytes:
        """The structural character that follows if whitespace does not, b"" if it is not sure."""
        if self.is_free() or self.is_number():
            return b""
        possible = [char for char in _STRUCTURE if self.allows(char)]
        return possible[0] if len(possible) == 1 else b""
