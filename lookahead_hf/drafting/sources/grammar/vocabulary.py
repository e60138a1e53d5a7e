"""The texts of tokens, and the tokens of a text."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
