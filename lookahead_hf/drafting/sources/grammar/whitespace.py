"""The whitespace that a text puts between the parts of its JSON."""

from __future__ import annotations

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
