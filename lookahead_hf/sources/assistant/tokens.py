"""Translates a row's text into the assistant's vocabulary, and its drafts back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

KEPT = 12
"""Newest tokens that every step encodes again, so that a word can still change its tokens."""

REACH = 4
"""Distance within which two encodings of one text are expected to agree again."""

HELD_BACK = 8
"""Tokens after which a text is read although it ends inside a character."""

PADDED = 0.02
"""Relative difference that two vocabularies of one tokenizer may have. Padding makes less than
0.5 %, another version of the tokenizer more."""

BROKEN = "\ufffd"
"""The text of an unfinished character."""


class SameTokens:
    """A row whose tokens `ids` are also the assistant's; `num_settled` of them cannot change."""

    def __init__(self, vocab_size: int) -> None:
        """Replace ids from `vocab_size` on (images, a larger padding) by 0."""
        self._vocab_size = vocab_size
        self.ids: list[int] = []
        self.num_settled = 0

    def extend(self, context: np.ndarray) -> int:
        """Read on in the context, [tokens]; return the number of unchanged ids."""
        unchanged = len(self.ids)
        new = context[unchanged:]
        self.ids += np.where(new < self._vocab_size, new, 0).tolist()
        self.num_settled = len(self.ids) - 1
        return unchanged


class Bridge:
    """A row in the tokens of an assistant with another vocabulary, while the target's text grows.

    Only the newest tokens are decoded and encoded again, so the cost does not grow with the text.
    Disagreeing encodings are joined at the first tokens that both have. A failed join costs drafts,
    never text.
    """

    def __init__(self, target_tokenizer: Any, assistant_tokenizer: Any) -> None:
        self._target, self._assistant = target_tokenizer, assistant_tokenizer
        first = assistant_tokenizer("")["input_ids"][:1]
        begins = first == [assistant_tokenizer.bos_token_id]
        self.ids: list[int] = list(first) if begins else []
        self.num_settled = len(self.ids)
        self._open = ""  # text of what is not settled
        self._num_read = 0  # target tokens whose text has been encoded

    def extend(self, context: np.ndarray) -> int:
        """Read on in the context, [tokens]; return the number of unchanged ids."""
        unchanged = self.num_settled
        start = max(0, self._num_read - KEPT)
        known = _decode(self._target, context[start : self._num_read].tolist())
        text = _decode(self._target, context[start:].tolist())
        if text.endswith(BROKEN) and len(context) - self._num_read <= HELD_BACK:
            return len(self.ids)
        self._num_read = len(context)
        self._open += text[len(known) :]
        again = self._assistant.encode(self._open, add_special_tokens=False)
        self.ids[unchanged:] = _joined(self.ids[unchanged:], again)
        if len(again) > 2 * KEPT or (self.ids and not unchanged):
            self._settle(max(1, len(self.ids) - KEPT))
        return unchanged

    def _settle(self, count: int) -> None:
        """Settle the ids before `count`, if the text can be cut there too."""
        text = _decode(self._assistant, self.ids[self.num_settled : count])
        for head in (text, " " + text):  # some decoders drop the space before the first word
            if self._open.startswith(head):
                self._open = self._open[len(head) :]
                break
        else:
            if self.num_settled > 0 and count - self.num_settled <= 4 * KEPT:
                return
            self._open = _decode(self._assistant, self.ids[count:])
        self.num_settled = count

    def translate(self, drafted: Sequence[int], context: np.ndarray) -> list[int]:
        """Translate a draft after `ids` into target tokens; none if the texts disagree."""
        before = self.ids[self.num_settled :]
        known = _decode(self._assistant, before)
        text = _decode(self._assistant, [*before, *drafted])[len(known) :].rstrip(BROKEN)
        if not text:
            return []
        start = max(0, self._num_read - KEPT)
        tail = context[start:].tolist()
        known = _decode(self._target, context[start : self._num_read].tolist())
        found = _following(tail, self._encode(known + text))
        if found is None and self._num_read == len(context):
            # The target ended a token at a place where its tokenizer would not.
            found = self._encode(text)
            if _decode(self._target, [*tail, *found]) != known + text:
                return []
        return found or []

    def _encode(self, text: str) -> list[int]:
        return self._target.encode(text, add_special_tokens=False)


def differ(target_tokenizer: Any, assistant_tokenizer: Any) -> bool:
    """Return whether two tokenizers, if both are given, have different tokens for the same ids.

    ValueError if only the assistant's is given.
    """
    if assistant_tokenizer is not None and target_tokenizer is None:
        raise ValueError(
            "assistant_tokenizer= needs tokenizer= beside it, the target's: drafts are translated "
            "from one vocabulary to the other as text (leave both out if they are the same)"
        )
    if assistant_tokenizer is None or target_tokenizer is assistant_tokenizer:
        return False
    if len(target_tokenizer) != len(assistant_tokenizer):
        return True
    return target_tokenizer.get_vocab() != assistant_tokenizer.get_vocab()


def check_sizes(target_size: int, assistant_size: int) -> None:
    """Raise ValueError if an assistant without tokenizers cannot have the target's vocabulary."""
    if abs(target_size - assistant_size) > PADDED * max(target_size, assistant_size):
        raise ValueError(
            f"the assistant has {assistant_size} token ids, the model {target_size}: they have "
            "different tokenizers. Pass both in the call, tokenizer= of the model and "
            "assistant_tokenizer=, and drafts are translated as text"
        )


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _joined(old: list[int], new: list[int]) -> list[int]:
    """Join a new encoding of a longer text to the part of the old one before they agree.

    The first token of `new` may differ only because nothing precedes it.
    """
    meetings = sorted(
        ((i, j) for i in range(min(len(old), REACH)) for j in range(min(len(new), REACH))),
        key=lambda meeting: (abs(meeting[0] - meeting[1]), sum(meeting)),
    )
    for i, j in meetings:
        shared = min(2, len(old) - i, len(new) - j)
        if old[i : i + shared] == new[j : j + shared]:
            return old[:i] + new[j:]
    return new


def _following(tail: list[int], encoded: list[int]) -> list[int] | None:
    """Return the tokens of `encoded` after those of `tail`; None if it does not have them."""
    for shift in sorted(range(-REACH, REACH + 1), key=abs):
        end = len(tail) + shift
        shared = min(2, len(tail), end)
        if shared > 0 and encoded[end - shared : end] == tail[len(tail) - shared :]:
            return encoded[end:]
    return None
