"""A row's text in another vocabulary: there for the assistant to read, back for the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

KEPT = 12
"""Newest tokens that are encoded anew in every step, so that a word can still change its tokens."""

REACH = 4
"""Places within which two encodings of the same text are expected to meet."""

HELD_BACK = 8
"""Tokens after which a text that does not end in a whole character is taken as it is."""

PADDED = 0.02
"""Part of a vocabulary by which two models of one tokenizer may differ; it is under 0.5 % where
they pad it differently, and more than that between two versions of a tokenizer."""

BROKEN = "\ufffd"
"""What the bytes of an unfinished character decode to."""


class SameTokens:
    """A row whose tokens are the assistant's as they are.

    Attributes:
        ids: The row in the assistant's tokens.
        num_settled: How many of them will not change any more.
    """

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size`: ids from here on (images, a larger padding) are unknown and become 0."""
        self._vocab_size = vocab_size
        self.ids: list[int] = []
        self.num_settled = 0

    def extend(self, context: np.ndarray) -> int:
        """Read on in the context, [tokens]; returns how many ids are what they were before."""
        unchanged = len(self.ids)
        new = context[unchanged:]
        self.ids += np.where(new < self._vocab_size, new, 0).tolist()
        self.num_settled = len(self.ids) - 1
        return unchanged


class Bridge:
    """A row in the tokens of an assistant with another vocabulary, while the target's text grows.

    Only the newest tokens are ever decoded and encoded again, so a step costs the same in any text.
    Where two encodings disagree, they are joined at the first tokens that both have; a join that
    fails costs drafts, never text.

    Attributes:
        ids: The row in the assistant's tokens.
        num_settled: How many of them will not change any more.
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
        """Read on in the context, [tokens]; returns how many ids are what they were before.

        Special tokens are not text and are left out.
        """
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
        """Let go of all ids but those from `count` on, where the text can be cut there too."""
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
        """The target's tokens for a draft behind `ids`.

        Args:
            drafted: Draft tokens of the assistant.
            context: The row in the target's tokens, [tokens].

        Returns:
            Tokens that follow the context; none where the two texts do not meet.
        """
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
            # The target ended a token where its tokenizer would not.
            found = self._encode(text)
            if _decode(self._target, [*tail, *found]) != known + text:
                return []
        return found or []

    def _encode(self, text: str) -> list[int]:
        return self._target.encode(text, add_special_tokens=False)


def differ(target_tokenizer: Any, assistant_tokenizer: Any) -> bool:
    """Whether two tokenizers, if both are given, mean different tokens by the same ids.

    Raises:
        ValueError: Only the assistant's is given, which says nothing by itself.
    """
    if assistant_tokenizer is not None and target_tokenizer is None:
        raise ValueError(
            "assistant_tokenizer= needs tokenizer= beside it, the target's: drafts are carried "
            "from the one vocabulary to the other as text (leave both out where they are the same)"
        )
    if target_tokenizer is None or assistant_tokenizer is None:
        return False
    if target_tokenizer is assistant_tokenizer:
        return False
    if len(target_tokenizer) != len(assistant_tokenizer):
        return True
    return target_tokenizer.get_vocab() != assistant_tokenizer.get_vocab()


def check_sizes(target_size: int, assistant_size: int) -> None:
    """Refuse an assistant without tokenizers whose vocabulary cannot be the target's.

    Sizes of one vocabulary differ by what the models pad it to, and by tokens for images.

    Raises:
        ValueError: They differ by more.
    """
    if abs(target_size - assistant_size) > PADDED * max(target_size, assistant_size):
        raise ValueError(
            f"the assistant has {assistant_size} token ids, the model {target_size}: they have "
            "different tokenizers. Pass both in the call, tokenizer= of the model and "
            "assistant_tokenizer=, and drafts are carried over as text"
        )


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _joined(old: list[int], new: list[int]) -> list[int]:
    """A new encoding of a text and more, behind what the old one has before they meet.

    The first token of `new` may differ merely because nothing stands before it.
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
    """What stands in `encoded` behind the tokens of `tail`; None where it has other ones."""
    for shift in sorted(range(-REACH, REACH + 1), key=abs):
        end = len(tail) + shift
        shared = min(2, len(tail), end)
        if shared > 0 and encoded[end - shared : end] == tail[len(tail) - shared :]:
            return encoded[end:]
    return None
