"""What a grammar allows: bytes of tokens, whitespace, probes."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from lookahead_hf.logits.grammars.protocol import Grammar

_SPLIT = re.compile(rb"(?<=\s)(?= \S)")
"""Tokenizers leave the last of several spaces to the next word."""


class Vocabulary:
    """The bytes of every token id, `texts`, and the tokens of the `most_kept` latest texts."""

    def __init__(self, texts: Sequence[bytes], most_kept: int = 4096) -> None:
        self.texts, self._most_kept = texts, most_kept
        # SentencePiece has tokens of single bytes first; later ids are the usual ones.
        self._token_of = {bytes(text): token for token, text in enumerate(texts)}
        self._encoded: dict[bytes, list[int]] = {}

    def encode(self, text: bytes) -> list[int]:
        """Return the tokens that a tokenizer makes of a text, up to the first byte it lacks.

        Byte pair encodings number tokens in the order of their merges, so the numbers are enough.
        For other tokenizers a draft may be wrong, nothing else.
        """
        if text not in self._encoded:
            merged = [piece for part in _SPLIT.split(text) for piece in self._merged(part)]
            tokens = [self._token_of.get(piece) for piece in merged]
            end = tokens.index(None) if None in tokens else len(tokens)
            if len(self._encoded) >= self._most_kept:
                self._encoded.clear()
            self._encoded[text] = [token for token in tokens[:end] if token is not None]
        return self._encoded[text]

    def _merged(self, text: bytes) -> list[bytes]:
        pieces = [text[at : at + 1] for at in range(len(text))]
        while len(pieces) > 1:
            pairs = [first + second for first, second in zip(pieces, pieces[1:], strict=False)]
            ranks = [self._token_of.get(pair, len(self.texts)) for pair in pairs]
            best = min(range(len(ranks)), key=ranks.__getitem__)
            if ranks[best] == len(self.texts):
                break
            pieces[best : best + 2] = [pairs[best]]
        return pieces

    def longest(self, tokens: list[int]) -> list[int]:
        """Return the tokens whose text begins no other one's: `name` of `n`, `na`, `name`."""
        texts = {bytes(self.texts[token]): token for token in tokens}
        return [
            token
            for text, token in texts.items()
            if not any(other != text and other.startswith(text) for other in texts)
        ]


_OPENING, _CLOSING = b"{[", b"}]"
_SPACE = b" \n\r\t"
_QUOTE, _ESCAPE = b'"\\'


class Whitespace:
    """Remembers the latest whitespace after `:`, `,` and brackets, for each depth of nesting."""

    def __init__(self) -> None:
        self._usual: dict[tuple[int, int], bytes] = {}
        self._default = {ord(":"): b" ", ord(","): b" "}  # what most models write
        self._depth = 0
        self._is_quoted = self._is_escaped = False
        self._last, self._space = 0, b""  # what came before the whitespace that is being read

    def learn(self, text: bytes) -> None:
        for char in text:
            if self._is_quoted:
                is_end = char == _QUOTE and not self._is_escaped
                self._is_escaped = char == _ESCAPE and not self._is_escaped
                self._is_quoted = not is_end
                self._last = char
            elif char in _SPACE:
                self._space += bytes([char])
            else:
                self._note(char)

    def _note(self, char: int) -> None:
        """Read a character outside strings that is no whitespace."""
        if char in _CLOSING:
            self._depth -= 1
        if key := _place(self._last, char):
            self._usual[key, self._depth] = self._default[key] = self._space
            if self._last in _OPENING and b"\n" in self._space:  # so does each of its lines
                self._usual[ord(","), self._depth] = self._space
        if char in _OPENING:
            self._depth += 1
        self._is_quoted = char == _QUOTE
        self._last, self._space = char, b""

    def before(self, char: int, text: bytes) -> bytes:
        """Return what usually stands before a structural character after the unread `text`."""
        depth = self._depth - (char in _CLOSING)
        for bracket in _OPENING:
            depth += text.count(bracket)
        for bracket in _CLOSING:
            depth -= text.count(bracket)
        key = _place(text[-1] if text else self._last, char)
        return self._usual.get((key, depth), self._default.get(key, b""))


def _place(last: int, char: int) -> int:
    """Return the character that the whitespace between two others belongs to, 0 for none."""
    if char in _CLOSING:
        return char
    return last if last in b":,{[" else 0


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
