"""Grammars of xgrammar."""

from __future__ import annotations

from typing import Any

import xgrammar

from lookahead_hf.logits.grammars.protocol import few_bits


class XGrammar:
    """A matcher made from a compiled grammar; see `Grammar`."""

    def __init__(self, compiled: Any) -> None:
        """Match a `CompiledGrammar`, which matchers may share."""
        self._info = compiled.tokenizer_info
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._num_tokens = self._info.vocab_size  # a model may have more logits
        self._mask = xgrammar.allocate_token_bitmask(1, self._num_tokens)
        # The matcher prints a warning about tokens without a text, and about any once it has ended.
        special = self._info.special_token_ids
        self._refused = frozenset(special) - frozenset(self._matcher.stop_token_ids)
        self.vocabulary = f"{self._info.dump_metadata()} {special}"

    def texts(self) -> list[bytes]:
        return self._info.decoded_vocab

    def advance(self, token: int) -> bool:
        if token >= self._num_tokens or token in self._refused or self.ended():
            return False
        return self._matcher.accept_token(token)

    def advance_text(self, text: bytes) -> int:
        return int(not self.ended() and self._matcher.accept_string(text))

    def back(self, steps: int) -> None:
        if steps:
            self._matcher.rollback(steps)

    def forced_tokens(self) -> list[int]:
        return []

    def forced_text(self) -> bytes:
        if self.ended():
            return b""
        try:
            return self._matcher.find_jump_forward_string().encode()
        except UnicodeDecodeError:  # after a token that is half a character
            return b""

    def allowed(self, limit: int) -> list[int] | None:
        if self.ended():
            return []
        forbids = self._matcher.fill_next_token_bitmask(self._mask, 0)
        return few_bits(self._mask[0].numpy(), limit) if forbids else None

    def ended(self) -> bool:
        return self._matcher.is_terminated()
