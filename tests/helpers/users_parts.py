"""Processors, criteria and functions as callers of `generate` write them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from transformers import LlamaForCausalLM, LogitsProcessor, StoppingCriteria

from tests.helpers.models import VOCAB


class Allowed:
    """Allows tokens by row, prefix and the number of its calls; may draw random numbers."""

    def __init__(self, draws: bool) -> None:
        self.draws, self.asked = draws, 0

    def __call__(self, row: int, ids: torch.Tensor) -> list[int]:
        self.asked += 1
        if self.draws:
            torch.rand(())
        return [token for token in range(VOCAB) if (token + int(ids.sum()) + row + self.asked) % 3]


class Leans(LogitsProcessor):
    """Prefers tokens by the row's whole prefix."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        liked = (
            input_ids.sum(1, keepdim=True) + torch.arange(scores.shape[1], device=scores.device)
        ) % 4 == 0
        return scores + 2.0 * liked


class Counts(LogitsProcessor):
    """Acts on every third call only: it must be called once per token, in order."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores if self.calls % 3 else scores.roll(1, 1)


class Mixes(LogitsProcessor):
    """Lets the rows of a batch look at each other."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 0.3 * scores.flip(0)


class Draws(LogitsProcessor):
    """Draws from the default generator itself."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 3.0 * torch.rand_like(scores)


class EditsText(LogitsProcessor):
    """Redacts some tokens of prompt and text, and prefers tokens by what it has left."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        input_ids[input_ids % 10 == 3] = 7
        liked = (
            input_ids.sum(1, keepdim=True) + torch.arange(scores.shape[1], device=scores.device)
        ) % 4 == 0
        return scores + 2.0 * liked


class Unknown(LogitsProcessor):
    """Changes nothing, but nobody can know that: the rows of a batch take steps together."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


PROCESSORS: dict[str, type[LogitsProcessor]] = {
    "leans": Leans,
    "counts": Counts,
    "mixes": Mixes,
    "draws": Draws,
    "edits": EditsText,
}


class Criterion(StoppingCriteria):
    """Ends texts at some tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = torch.tensor(tokens)

    def ended(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], self.tokens.to(input_ids.device))


class EndsRow(Criterion):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return self.ended(input_ids)


class EndsAll(Criterion):
    """Ends all rows with the first that ends."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        ended = self.ended(input_ids)
        return ended.any().expand(len(ended))


class AnswersBool(Criterion):
    """Answers for all rows at once, by a Python bool."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        return bool(self.ended(input_ids).any())


class EditsNewest(EndsRow):
    """Changes the newest token before the model reads it."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        newest = input_ids[:, -1]
        newest -= (newest % 6 == 1).long()
        return self.ended(input_ids)


CRITERIA: dict[str, type[Criterion]] = {
    "row": EndsRow,
    "all": EndsAll,
    "bool": AnswersBool,
    "edits": EditsNewest,
}


class Changing(LlamaForCausalLM, ABC):
    """Changes the logits of its forwards."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        cache: Any = None,
        steps: int = 0,
        **kwargs: Any,
    ) -> Any:
        held = cache if past_key_values is None else past_key_values
        outputs = super().forward(input_ids, attention_mask, position_ids, held, **kwargs)
        assert outputs.logits is not None
        self.change(outputs.logits, steps)
        return outputs

    @abstractmethod
    def change(self, logits: torch.Tensor, steps: int) -> None:
        """Change logits, [rows, tokens, vocab]; `steps` is what the call's loop carries."""
