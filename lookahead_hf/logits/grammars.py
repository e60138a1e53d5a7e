"""Grammars that constrain a text: the interface, and an adapter for each library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Grammar(Protocol):
    """The state of one row's grammar, independent of the one that the row's processor holds.

    It starts before the first generated token. It decides no token: a wrong answer costs speed,
    never the text.
    """

    vocabulary: str  # the key of the tokenizer; grammars with the same key share its texts

    def texts(self) -> Sequence[bytes] | None:
        """Return the bytes of every token id, None if they are unknown."""
        ...

    def advance(self, token: int) -> bool:
        """Advance over a token; a forbidden one returns False and moves nothing."""
        ...

    def advance_text(self, text: bytes) -> int:
        """Advance over a text; return the steps for `back`, 0 if it is forbidden."""
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


class LLGuidance:
    """A matcher of a grammar's text, behind which one stop token may follow; see `Grammar`."""

    def __init__(self, tokenizer: Any, grammar: str) -> None:
        """Match a grammar of `LLMatcher.grammar_from_...`; ValueError if it is invalid.

        `tokenizer` is an `llguidance.LLTokenizer`.
        """
        import llguidance.torch

        self._fill_mask = llguidance.torch.fill_next_token_bitmask
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
        self._fill_mask(self._matcher, self._mask, 0)
        return few_bits(self._mask[0].numpy(), limit)

    def ended(self) -> bool:
        return self._has_stopped or self._matcher.stop_reason() == "EndOfSentence"


class XGrammar:
    """A matcher made from a compiled grammar; see `Grammar`."""

    def __init__(self, compiled: Any) -> None:
        """Match a `CompiledGrammar`, which matchers may share."""
        import xgrammar

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


_END = -1  # The state after the stop token, which an index has no number for


class OutlinesCore:
    """A path through an index, which does not know what tokens stand for; see `Grammar`."""

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


def few_bits(mask: np.ndarray, limit: int) -> list[int] | None:  # [words] int32
    """Return the numbers of the bits that are set, None if there are more than `limit`."""
    words = np.flatnonzero(mask)
    if len(words) > limit:
        return None
    bits = np.unpackbits(mask[words].view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    word, bit = np.nonzero(bits)
    return None if len(bit) > limit else (words[word] * 32 + bit).tolist()
