"""The interface of a grammar for drafting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Grammar(Protocol):
    """The state of one row's grammar, independent of the one that the row's processor holds.

    It starts before the first generated token. It decides no token: a wrong answer costs speed,
    never the text.

    Attributes:
        vocabulary: The key of the tokenizer; grammars with the same key share its texts.
    """

    vocabulary: str

    def texts(self) -> Sequence[bytes] | None:
        """Return the bytes of every token id, None if they are unknown."""
        ...

    def advance(self, token: int) -> bool:
        """Advance over a token; a forbidden one returns False and moves nothing."""
        ...

    def advance_text(self, text: bytes) -> int:
        """Advance over a text in any tokenization.

        Returns the number of steps for `back` to undo it; 0 if it is forbidden, and nothing moved.
        """
        ...

    def back(self, steps: int) -> None:
        """Undo the latest steps."""
        ...

    def forced_tokens(self) -> list[int]:
        """Return tokens that are certain, each the only one allowed; [] if unknown."""
        ...

    def forced_text(self) -> bytes:
        """Return the text that every continuation begins with; b"" if unknown."""
        ...

    def allowed(self, limit: int) -> list[int] | None:
        """Return the allowed tokens, None if there are more than `limit`."""
        ...

    def ended(self) -> bool:
        """Return whether nothing but padding can follow."""
        ...


def few_bits(mask: np.ndarray, limit: int) -> list[int] | None:  # [words] int32
    """Return the numbers of the bits that are set, None if there are more than `limit`."""
    words = np.flatnonzero(mask)
    if len(words) > limit:
        return None
    bits = np.unpackbits(mask[words].view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    word, bit = np.nonzero(bits)
    return None if len(bit) > limit else (words[word] * 32 + bit).tolist()
