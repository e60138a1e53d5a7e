"""Replays recorded texts through the drafting of a call: the text decides what is accepted.

No model runs. Drafters, learned rates and budget are those of a call; a function says what a step
costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.draft import ROOT, DraftTree, Verdict
from lookahead_hf.drafting.budget import FixedRunner
from lookahead_hf.drafting.drafter import Drafter, Step
from lookahead_hf.drafting.session import DraftSession, Limits
from lookahead_hf.drafting.sources.recycling import RecyclingDrafter
from lookahead_hf.rows import Rows
from lookahead_hf.stats import SourceStats

UNUSED = torch.empty(1, 0, 0)
"""Replaces the logits: those that were recorded arrive in `RecordedRecycling.seen`."""

StepSeconds = Callable[[int, int], float]
"""The seconds of a step, from its draft tokens and the length of the text before it."""


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


class RecordedRecycling(RecyclingDrafter):
    """Recycles recorded tokens instead of a tensor of logits.

    What a model says after rejected draft tokens was not recorded, so drafts are a little worse
    than in a call.
    """

    seen: Seen

    def observe(self, step: Step) -> None:
        best = self.seen.top_ids.copy(), self.seen.top_probs.copy()
        self._memory.remember(self.seen.before, self.seen.last, *best)  # type: ignore[union-attr]
        self.note_rejected(
            np.zeros(1, np.int64), step.rows.last_tokens, *(part[-1:] for part in best)
        )


@dataclass(frozen=True)
class Replayed:
    """The steps of one text by their draft tokens, and each drafter's part in them.

    `emitted` counts the tokens of the output without the first one, which the prefill emits.
    """

    emitted: int
    budgets: Counter[int]
    sources: dict[str, SourceStats]

    @property
    def steps(self) -> int:
        return self.budgets.total()


class MemoryHolder:
    """Stands in for a model: drafting keeps its memory between calls with it."""

    device, dtype = "cpu", "replayed"


def replay(
    text: Text,
    model: Any,
    config: SpeculativeConfig,
    sources: Sequence[Drafter],
    max_new_tokens: int,
    step_seconds: StepSeconds,
) -> Replayed:
    """Draft a text of two tokens of output or more from its second token on, as a call does.

    `model`, such as a `MemoryHolder`, keeps learned rates and costs from text to text. Sources that
    read logits must be `RecordedRecycling`. `step_seconds` is called once per step, in order.
    """
    tokens, length = text.tokens[: len(text.prompt) + max_new_tokens], len(text.prompt) + 1
    rows = Rows(tokens[None, : length - 1])
    rows.emit(0, int(tokens[length - 1]))
    limits = Limits(False, 2**31, max_new_tokens)
    drafts = DraftSession(model, config, rows, list(sources), limits, FixedRunner())
    recycling = [source for source in sources if isinstance(source, RecordedRecycling)]
    drafts.begin(rows)
    budgets: Counter[int] = Counter()
    while length < len(tokens):
        draft = drafts.propose(rows)
        path = accepted_path(draft, tokens[length:-1])
        new = tokens[length : length + len(path) + 1].tolist()
        for source in recycling:
            source.seen = seen(text, length - 1, length + len(path))
        for token in new:
            rows.emit(0, token)
        drafts.prepare(SimpleNamespace(logits=UNUSED))
        seconds = step_seconds(draft.max_nodes, length)
        drafts.observe(rows, draft, Verdict.from_rows([new], [path]), UNUSED, seconds)
        budgets[draft.max_nodes] += 1
        length += len(new)
    drafts.end(rows)
    return Replayed(len(tokens) - len(text.prompt) - 1, budgets, drafts.source_stats())
