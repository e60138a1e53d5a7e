"""The text that each token of a trace adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def pieces_of(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, ...]:
    """Split the text of tokens into what each of them adds.

    A token's text may depend on the tokens before it. So every token is decoded together with those
    that the latest piece came from. A character of several tokens belongs to the last of them.

    Args:
        tokenizer: Anything whose `decode` turns ids into text.
        tokens: Token ids.

    Returns:
        As many pieces as tokens; some may be empty.
    """
    pieces = [""] * len(tokens)
    context = done = 0  # where the latest piece's tokens begin and end
    for index in range(len(tokens)):
        known = tokenizer.decode(list(tokens[context:done]))
        text = tokenizer.decode(list(tokens[context : index + 1]))
        if text.endswith("\ufffd") and index + 1 < len(tokens):
            continue  # bytes that are not a whole character yet
        pieces[index] = text[len(known) :]
        context, done = done, index + 1
    return tuple(pieces)
