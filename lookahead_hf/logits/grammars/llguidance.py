"""Grammars of llguidance."""

from __future__ import annotations

from typing import Any

import llguidance.torch

from lookahead_hf.logits.grammars.protocol import few_bits


class LLGuidance:
    """A matcher made from a grammar's text; see `Grammar`.

    llguidance stops after the last byte of its grammar; one stop token may follow there.
    """

    def __init__(self, tokenizer: Any, grammar: str) -> None:
        """Match a grammar of `LLMatcher.grammar_from_...`; ValueError if it is invalid.

        `tokenizer` is an `llguidance.LLTokenizer`.
        """
        self._tokenizer = tokenizer
        self._matcher = llguidance.LLMatcher(tokenizer, grammar)
        if self._matcher.is_error():
            raise ValueError(f"llguidance: {self._matcher.get_error()}")
        self._stop_tokens = list(tokenizer.eos_tokens)
        self._has_stopped = False
        self._mask = llguidance.torch.allocate_token_bitmask(1, tokenizer.vocab_size)
        some = range(0, len(self), 1 + len(self) // 64)
        texts = [tokenizer.decode_bytes([token]) for token in some]
        self.vocabulary = f"llguidance {len(self)} {self._stop_tokens} {texts}"

    def texts(self) -> list[bytes]:
        return [self._tokenizer.decode_bytes([token]) for token in range(len(self))]

    def __len__(self) -> int:
        return int(self._tokenizer.vocab_size)

    def advance(self, token: int) -> bool:
        if not self._matcher.is_stopped():
            # `consume_token` would leave the matcher in an error state for good.
            return self._matcher.try_consume_tokens([token]) == 1
        fits = token in self._stop_tokens and not self.ended()
        self._has_stopped |= fits
        return fits

    def advance_text(self, text: bytes) -> int:
        tokens = self._tokenizer.tokenize_bytes(text)
        steps = 0 if self._matcher.is_stopped() else self._matcher.try_consume_tokens(tokens)
        if steps == len(tokens):
            return steps
        self.back(steps)
        return 0

    def back(self, steps: int) -> None:
        if steps and self._has_stopped:
            steps, self._has_stopped = steps - 1, False
        if steps:
            self._matcher.rollback(steps)

    def forced_tokens(self) -> list[int]:
        if not self._matcher.is_stopped():
            return self._matcher.compute_ff_tokens()
        return [] if self.ended() else self._stop_tokens[:1]

    def forced_text(self) -> bytes:
        return b"" if self._matcher.is_stopped() else self._matcher.compute_ff_bytes()

    def allowed(self, limit: int) -> list[int] | None:
        if self.ended():
            return []
        llguidance.torch.fill_next_token_bitmask(self._matcher, self._mask, 0)
        return few_bits(self._mask[0].numpy(), limit)

    def ended(self) -> bool:
        return self._has_stopped or self._matcher.stop_reason() == "EndOfSentence"
