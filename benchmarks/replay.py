"""Replay recorded texts: a contender drafts, and the text decides what is accepted.

No model runs, and no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lookahead_hf.draft import ROOT, DraftTree


@dataclass(frozen=True)
class Text:
    """A prompt, the model's output, and the tokens that it expected at every position."""

    family: str
    index: int  # of the prompt within its family
    prompt: np.ndarray  # [prompt] int64
    output: np.ndarray  # [output] int64
    top_ids: np.ndarray  # [prompt + output - 1, top] int32, likeliest first, after each token
    top_probs: np.ndarray  # the same shape, float32

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and output, [prompt + output] int64."""
        return np.concatenate([self.prompt, self.output])


@dataclass(frozen=True)
class Seen:
    """Verified tokens and what the target expected after each, the end of the text last.

    `last[i]` follows `before[i]`; after it the target's likeliest tokens are `top_ids[i]`.
    """

    before: np.ndarray  # [tokens] int64, -1 where there is none
    last: np.ndarray  # [tokens] int64
    top_ids: np.ndarray  # [tokens, top] int32, likeliest first
    top_probs: np.ndarray  # the same shape, float32


def seen(text: Text, start: int, end: int) -> Seen:
    """Return what the target expected after the tokens `start` to `end` of a text."""
    tokens = text.tokens
    before = np.concatenate([[-1], tokens])[start:end]
    ids, probs = text.top_ids[start:end], text.top_probs[start:end]
    return Seen(before, tokens[start:end], ids, probs)


def accepted_path(draft: DraftTree, truth: np.ndarray) -> list[int]:
    """Return the accepted nodes of a one-row tree, root to leaf.

    `truth` is what the target emits next, [tokens], without the text's last token, which can only
    be a bonus token.
    """
    path: list[int] = []
    for token in truth.tolist():
        child = draft.child_of(0, path[-1] if path else ROOT, token)
        if child is None:
            break
        path.append(child)
    return path


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
