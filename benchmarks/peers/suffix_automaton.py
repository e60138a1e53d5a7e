"""A suffix automaton that grows with a text and knows where each substring first ended."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class State:
    """Substrings that occur at the same places; `length` is that of the longest."""

    length: int
    first_end: int  # tokens up to the end of the first occurrence
    link: int = -1
    next: dict[int, int] = field(default_factory=dict)


class SuffixAutomaton:
    """Built online (Blumer et al. 1985), with the longest earlier match of the text's end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.states = [State(0, 0)]
        self._whole = 0  # the state of the whole text
        self._match = (0, 0)

    def extend(self, tokens: list[int]) -> None:
        """Append tokens, each matched with the text before it."""
        for token in tokens:
            self._match = self.matched(token)
            self._append(token)

    def matched(self, token: int) -> tuple[int, int]:
        """Return state and length of the longest earlier match of the text's end plus `token`."""
        state, length = self._match
        while state and token not in self.states[state].next:
            state = self.states[state].link
            length = self.states[state].length
        if token not in self.states[state].next:
            return 0, 0
        return self.states[state].next[token], length + 1

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        new = self._add(State(len(self.tokens), len(self.tokens)))
        at, self._whole = self._whole, new
        while at >= 0 and token not in self.states[at].next:
            self.states[at].next[token] = new
            at = self.states[at].link
        self.states[new].link = 0 if at < 0 else self._state_after(at, token)

    def _state_after(self, at: int, token: int) -> int:
        """Return the state of the substrings of `at` plus `token`; split it off if needed."""
        found = self.states[at].next[token]
        length = self.states[at].length + 1
        if self.states[found].length == length:
            return found
        old = self.states[found]
        split = self._add(State(length, old.first_end, old.link, dict(old.next)))
        while at >= 0 and self.states[at].next.get(token) == found:
            self.states[at].next[token] = split
            at = self.states[at].link
        old.link = split
        return split

    def _add(self, state: State) -> int:
        self.states.append(state)
        return len(self.states) - 1
