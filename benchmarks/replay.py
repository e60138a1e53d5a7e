"""Replay recorded texts: a contender drafts, the text says what the target would have accepted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from record import Text

from lookahead_hf.draft import ROOT, DraftTree


@dataclass(frozen=True)
class Seen:
    """Verified tokens and what the target expected after each, the end of the text last.

    `last[i]` follows `before[i]`; after it the target's likeliest tokens are `top_ids[i]`.
    """

    before: np.ndarray  # [tokens] int64, -1 where there is none
    last: np.ndarray  # [tokens] int64
    top_ids: np.ndarray  # [tokens, top] int32, likeliest first
    top_probs: np.ndarray  # the same shape, float32


@dataclass(frozen=True)
class Outcome:
    """What came of one text."""

    family: str
    emitted: int  # without the first token, which the prefill gives
    steps: int
    drafted: int


@dataclass(frozen=True)
class Line:
    """One line of the result: a drafter on a family, or on all of them."""

    family: str
    drafter: str
    settings: str
    texts: int
    tokens_per_step: float
    nodes_per_step: float


class Contender(ABC):
    """A drafter as the replay sees it; it lives through all texts, one after the other."""

    name: str
    settings: str
    recycles = False
    """Whether it learns from what the target says after rejected nodes."""

    @abstractmethod
    def begin(self, tokens: np.ndarray, prompt: Seen) -> None:
        """A text begins.

        Args:
            tokens: The prompt and the first token of the output, [prompt + 1] int64.
            prompt: What the target expected inside the prompt.
        """

    @abstractmethod
    def propose(self) -> DraftTree:
        """One tree, of one row, of what may follow the tokens so far."""

    @abstractmethod
    def observe(self, draft: DraftTree, path: list[int], emitted: np.ndarray, seen: Seen) -> None:
        """A step was decided.

        Args:
            draft: What was proposed.
            path: Accepted nodes, root to leaf.
            emitted: Accepted tokens and the bonus token, [emitted] int64.
            seen: What the target said in this step.
        """

    def end(self) -> None:  # noqa: B027 (an optional hook)
        """The text is over."""


class Recorded:
    """The target as far as it was recorded: what it said after the text's own tokens."""

    def begin(self, text: Text) -> None:
        """A text begins."""

    def seen(self, text: Text, length: int, draft: DraftTree, path: list[int]) -> Seen:
        """What a step says: after `length` tokens of the text `draft` was verified."""
        return seen(text, length - 1, length + len(path))


RECORDED = Recorded()


def replay(
    texts: Iterable[Text], contender: Contender, target: Recorded = RECORDED
) -> list[Outcome]:
    """Draft every text from its second token on; one outcome per text."""
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


def seen(text: Text, start: int, end: int) -> Seen:
    """What the target expected after the tokens `start` to `end` of a text."""
    tokens = text.tokens
    before = np.concatenate([[-1], tokens])[start:end]
    ids, probs = text.top_ids[start:end], text.top_probs[start:end]
    return Seen(before, tokens[start:end], ids, probs)


def joined(first: Seen, second: Seen) -> Seen:
    """Both, one after the other."""
    parts = zip(vars(first).values(), vars(second).values(), strict=True)
    return Seen(*(np.concatenate(pair) for pair in parts))


def accepted_path(draft: DraftTree, truth: np.ndarray) -> list[int]:
    """Nodes along which a one-row tree says what the target would, root to leaf.

    Args:
        draft: The tree.
        truth: What the target emits from here, without the text's last token, which is a bonus
            token at best, [tokens] int64.
    """
    children: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for node, parent in enumerate(draft.parents.tolist()):
        children[parent].setdefault(int(draft.token_ids[node]), node)
    path: list[int] = []
    for token in truth.tolist():
        node = children[path[-1] if path else ROOT].get(token)
        if node is None:
            break
        path.append(node)
    return path
