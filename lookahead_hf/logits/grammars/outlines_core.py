"""Finite automata of outlines-core."""

from __future__ import annotations

from typing import Any

_END = -1
"""The state after the stop token, which an index has no number for."""


class OutlinesCore:
    """A path through an index, whose states are numbers; see `Grammar`.

    An index knows which tokens are allowed, not what they stand for.
    """

    vocabulary = ""

    def __init__(self, index: Any) -> None:
        """Start in an `outlines_core.Index`, which is never changed."""
        self._index = index
        self._path: list[int] = [index.get_initial_state()]
        self._allowed: dict[int, list[int]] = {}

    def texts(self) -> None:
        return None

    def advance(self, token: int) -> bool:
        if self.ended():
            return False
        following = self._index.get_next_state(self._path[-1], token)
        if following is None and self._index.is_final_state(self._path[-1]):
            following = _END if token in self._tokens() else None
        if following is not None:
            self._path.append(following)
        return following is not None

    def advance_text(self, text: bytes) -> int:
        return 0

    def back(self, steps: int) -> None:
        if steps:
            del self._path[-steps:]

    def forced_tokens(self) -> list[int]:
        return []

    def forced_text(self) -> bytes:
        return b""

    def allowed(self, limit: int) -> list[int] | None:
        tokens = self._tokens()
        return None if len(tokens) > limit else tokens

    def ended(self) -> bool:
        return self._path[-1] == _END

    def _tokens(self) -> list[int]:
        state = self._path[-1]
        if state not in self._allowed:
            ended = state == _END
            self._allowed[state] = [] if ended else self._index.get_allowed_tokens(state)
        return self._allowed[state]
