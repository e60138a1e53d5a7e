"""OpenAI's presence penalty, which transformers does not have."""

from __future__ import annotations

import torch
from transformers.generation.logits_process import LogitsProcessor


class PresencePenalty(LogitsProcessor):
    """Lowers the scores of tokens that the text has after its prompt."""

    def __init__(self, penalty: float, num_prompt: int) -> None:
        """`num_prompt`: tokens of the prompt, which do not count."""
        self.penalty, self.num_prompt = penalty, num_prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, [rows, vocab], for texts, [rows, columns]."""
        written = input_ids[:, self.num_prompt :]
        found = torch.zeros_like(scores).scatter_(1, written, self.penalty)
        return scores - found
