"""Log probabilities of the tokens of a request, for `return_logprobs=True`."""

from __future__ import annotations

from typing import Any

import torch

from lookahead_hf.call.outputs import RequestedOutputs


class LogProbs(RequestedOutputs):
    """Keeps the distributions that the tokens of a step were chosen from, until they are taken."""

    def __init__(self, generation_config: Any) -> None:
        super().__init__(generation_config, 1)
        self.chooses = True
        self._latest: list[torch.Tensor] = []

    def choose(self, row: int, scores: torch.Tensor, logits: torch.Tensor) -> None:
        super().choose(row, scores, logits)
        self._latest.append(scores.log_softmax(-1))

    def take(self, tokens: list[int]) -> list[float]:
        """Return the log probabilities of the tokens that were emitted since the last time."""
        latest, self._latest = self._latest, []
        return [float(each[token]) for each, token in zip(latest, tokens, strict=True)]
