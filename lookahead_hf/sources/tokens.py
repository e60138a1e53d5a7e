"""Translates a row's text into the assistant's vocabulary, and its drafts back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

KEPT = 12
"""Tokens before a text that are decoded or encoded with it, since they can change how it begins."""

HELD_BACK = 8  # Tokens after which a text is read although it ends inside a character

PADDED = 0.02
"""Relative difference that two vocabularies of one tokenizer may have. Padding makes less than
0.5 %, another version of the tokenizer more."""

BROKEN = "\ufffd"  # The text of an unfinished character


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

    Only the newest tokens are decoded and encoded again, so the cost does not grow with the text. A
    failed translation costs drafts, never text.
    """

    def __init__(self, target_tokenizer: Any, assistant_tokenizer: Any) -> None:
        self._target, self._assistant = target_tokenizer, assistant_tokenizer
        first = assistant_tokenizer("")["input_ids"][:1]
        begins = first == [assistant_tokenizer.bos_token_id]
        self.ids: list[int] = list(first) if begins else []
        self.num_settled = len(self.ids)
        self._num_read = 0  # target tokens whose text has been encoded

    def extend(self, context: np.ndarray) -> int:
        """Read on in the context, [tokens]; return the number of unchanged ids."""
        before, text = _split_text(self._target, context.tolist(), self._num_read)
        if text.endswith(BROKEN) and len(context) - self._num_read <= HELD_BACK:
            return len(self.ids)
        self._num_read = len(context)
        changed, new = _continued(self._assistant, before, text)
        unchanged = len(self.ids) - len(changed)
        if unchanged < self.num_settled or self.ids[unchanged:] != changed:
            unchanged, new = len(self.ids), _encode(self._assistant, text)
        self.ids[unchanged:] = new
        self.num_settled = max(self.num_settled, len(self.ids) - KEPT)
        return unchanged

    def translate(self, drafted: Sequence[int], context: np.ndarray) -> list[int]:
        """Translate a draft after `ids` into target tokens; none after half a character."""
        _, text = _split_text(self._assistant, [*self.ids, *drafted], len(self.ids))
        before, held_back = _split_text(self._target, context.tolist(), self._num_read)
        if held_back:
            return []
        # If the text changes the target's last token, it ended at a place of its own.
        changed, new = _continued(self._target, before, text.rstrip(BROKEN))
        return _encode(self._target, text.rstrip(BROKEN)) if changed else new


def differ(target_tokenizer: Any, assistant_tokenizer: Any) -> bool:
    """Return whether two tokenizers differ; ValueError if the target's alone is missing."""
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


def _split_text(tokenizer: Any, ids: list[int], first: int) -> tuple[str, str]:
    start = max(0, first - KEPT)
    known, whole = (
        tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for part in (ids[start:first], ids[start:])
    )
    return known, whole[len(known) :]


def _continued(tokenizer: Any, before: str, text: str) -> tuple[list[int], list[int]]:
    """Return the last tokens of `before` that change if `text` follows, and what replaces them."""
    known, whole = _encode(tokenizer, before), _encode(tokenizer, before + text)
    same = len(os.path.commonprefix([known, whole]))
    return known[same:], whole[same:]


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
