"""Replay recorded texts: a contender drafts, and the text decides what is accepted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from call_replay import Seen, Text, accepted_path, seen

from lookahead_hf.draft import DraftTree


@dataclass(frozen=True)
class Outcome:
    """The counts of one replayed text."""

    family: str
    emitted: int  # without the first token, which the prefill emits
    steps: int
    drafted: int


@dataclass(frozen=True)
class Line:
    """One line of the result: a drafter on one family, or on all of them."""

    family: str
    drafter: str
    settings: str
    texts: int
    tokens_per_step: float
    nodes_per_step: float


class Contender(ABC):
    """A drafter as the replay sees it; one object drafts all texts, one after the other."""

    name: str
    settings: str
    recycles = False
    """Whether it learns from the target's logits after rejected nodes."""

    @abstractmethod
    def begin(self, tokens: np.ndarray, prompt: Seen) -> None:
        """Begin a text.

        Args:
            tokens: The prompt and the first token of the output, [prompt + 1] int64.
            prompt: What the target expected inside the prompt.
        """

    @abstractmethod
    def propose(self) -> DraftTree:
        """Return a tree of one row that may follow the tokens so far."""

    @abstractmethod
    def observe(self, draft: DraftTree, path: list[int], emitted: np.ndarray, seen: Seen) -> None:
        """Learn from a verified step.

        Args:
            draft: What was proposed.
            path: Accepted nodes, root to leaf.
            emitted: Accepted tokens and the bonus token, [emitted] int64.
            seen: What the target expected in this step.
        """

    def end(self) -> None:  # noqa: B027 (an optional hook)
        """End the text."""


class Recorded:
    """The recorded target: knows its logits after the text's own tokens only."""

    def begin(self, text: Text) -> None:
        """Begin a text."""

    def seen(self, text: Text, length: int, draft: DraftTree, path: list[int]) -> Seen:
        """Return what a step sees that verifies `draft` after `length` tokens of the text."""
        return seen(text, length - 1, length + len(path))


RECORDED = Recorded()


def replay(
    texts: Iterable[Text], contender: Contender, target: Recorded = RECORDED
) -> list[Outcome]:
    """Draft every text from its second token on; return one outcome per text."""
    target = target if contender.recycles else RECORDED
    return [_replay(text, contender, target) for text in texts]


def _replay(text: Text, contender: Contender, target: Recorded) -> Outcome:
    tokens, length = text.tokens, len(text.prompt) + 1
    target.begin(text)
    contender.begin(tokens[:length], seen(text, 0, length - 1))
    emitted = steps = drafted = 0
    while length < len(tokens):
        draft = contender.propose()
        path = accepted_path(draft, tokens[length:-1])
        new = tokens[length : length + len(path) + 1]
        contender.observe(draft, path, new, target.seen(text, length, draft, path))
        length += len(new)
        emitted, steps, drafted = emitted + len(new), steps + 1, drafted + draft.num_nodes
    contender.end()
    return Outcome(text.family, emitted, steps, drafted)


def joined(first: Seen, second: Seen) -> Seen:
    """Concatenate both."""
    parts = zip(vars(first).values(), vars(second).values(), strict=True)
    return Seen(*(np.concatenate(pair) for pair in parts))
