"""Log probabilities of the tokens of a request, of others in their places, and of its prompt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from lookahead_hf.call.outputs import RequestedOutputs


@dataclass(frozen=True)
class Wanted:
    """Which log probabilities the outputs of a run hold.

    Attributes:
        of_tokens: Those of the tokens.
        num_top: How many of the likeliest tokens in every place have theirs, too.
        of_prompt: Those of the prompt's tokens.
    """

    of_tokens: bool = False
    num_top: int = 0
    of_prompt: bool = False


@dataclass
class Found:
    """The log probabilities of a text.

    Attributes:
        of_tokens: One per new token.
        top: The likeliest tokens in the place of each new token, the likeliest first.
        of_prompt: One per token of the prompt, None for the first; None if they are not wanted.
    """

    of_tokens: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    of_prompt: list[float | None] | None = None

    def add(self, wanted: Wanted, scores: Iterable[torch.Tensor], tokens: list[int]) -> None:
        """Add tokens, which were chosen by scores, [vocab] each."""
        for each, token in zip(scores, tokens, strict=True):
            log_probs = each.log_softmax(-1)
            self.of_tokens.append(float(log_probs[token]))
            if wanted.num_top:
                best = log_probs.topk(min(wanted.num_top, len(log_probs)))
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                self.top.append(dict(pairs))


class KeptScores(RequestedOutputs):
    """Keeps the scores that the tokens of a step were chosen by, until they are taken."""

    def __init__(self, generation_config: Any) -> None:
        super().__init__(generation_config, 1)
        self.chooses = True
        self._latest: list[torch.Tensor] = []

    def choose(self, row: int, scores: torch.Tensor, logits: torch.Tensor) -> None:
        super().choose(row, scores, logits)
        self._latest.append(scores)

    def take(self) -> list[torch.Tensor]:
        """Return the scores since the last time."""
        latest, self._latest = self._latest, []
        return latest


@torch.no_grad()
def of_prompt(model: Any, ids: torch.Tensor) -> list[float | None]:
    """Return the log probability of each token of a prompt, [1, tokens]; None for the first."""
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    found: list[float | None] = [None]
    for some, tokens in zip(logits.split(256), ids[0, 1:].split(256), strict=True):
        log_probs = some.float().log_softmax(-1)
        found += log_probs.gather(-1, tokens[:, None])[:, 0].tolist()
    return found
