"""Stopping criteria row by row, with the answers that plain `generate` gets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from transformers.generation import stopping_criteria as hf


class StopTexts(hf.StoppingCriteria):
    """Ends a text in which one of some strings appears after the prompt.

    transformers' `StopStringCriteria` compares every string with the whole vocabulary before the
    first token, which takes minutes for long strings; this one reads the end of the text.
    """

    def __init__(self, strings: Iterable[str], tokenizer: Any, num_prompt: int) -> None:
        """`num_prompt`: tokens of the prompt, in which strings do not count."""
        self.strings, self.tokenizer, self.num_prompt = tuple(strings), tokenizer, num_prompt
        # A token may be no more than a byte of a character.
        self._most = max(len(string.encode()) for string in self.strings) + 8

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return which rows, [rows, columns], end with their latest token, [rows] bool."""
        first = max(self.num_prompt, input_ids.shape[1] - self._most)
        texts = self.tokenizer.batch_decode(input_ids[:, first:], skip_special_tokens=True)
        found = [any(string in text for string in self.strings) for text in texts]
        return torch.tensor(found, device=input_ids.device)


_UNEVEN = (hf.MaxTimeCriteria, hf.StopStringCriteria, StopTexts)  # May end rows at any lengths
_KNOWN = (hf.EosTokenCriteria, hf.MaxLengthCriteria, *_UNEVEN)
"""Criteria, by exact type, whose answer for a row depends on that row alone."""


def knows_criterion(criterion: Any) -> bool:
    """Return whether a criterion's answer for a row depends on that row alone, without state."""
    return type(criterion) in _KNOWN


def with_stop_strings(
    criteria: Iterable[Any] | None, strings: Any, tokenizer: Any
) -> hf.StoppingCriteriaList:
    """Return criteria of a caller with one for stop strings.

    `generate` would build that one itself, but drops the tokenizer for decoding strategies. An
    instance that the caller gave takes its place, as in plain generation.
    """
    given = list(criteria or ())
    if not any(type(each) is hf.StopStringCriteria for each in given):
        given.append(hf.StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
    return hf.StoppingCriteriaList(given)


class RowStopping:
    """One call's stopping criteria, for rows that advance by different counts.

    Lengths, times and eos ids are compared as numbers; stop strings are matched only after a token
    that can end one. If there is a criterion of another class, the whole list is called as in plain
    generation, which is possible for a single row only.

    Attributes:
        has_eos: Whether plain feeds finished rows pads instead of real tokens.
        all_known: Whether every class is known; an unknown one may draw random numbers.
    """

    def __init__(self, criteria: hf.StoppingCriteriaList, num_rows: int) -> None:
        self._criteria, self._num_rows = criteria, num_rows
        self._unknown = [c for c in criteria if not knows_criterion(c)]
        if type(criteria) is not hf.StoppingCriteriaList:
            self._unknown.append(criteria)

        def of(kind: type[Any]) -> list[Any]:
            return [each for each in criteria if type(each) is kind]

        self._times, self._texts = of(hf.MaxTimeCriteria), of(StopTexts)
        self._strings = [_StopStrings(each) for each in of(hf.StopStringCriteria)]
        ends = [each.eos_token_id.reshape(-1).tolist() for each in of(hf.EosTokenCriteria)]
        self._eos = {token for tokens in ends for token in tokens}
        self._max_length = min(
            (each.max_length for each in of(hf.MaxLengthCriteria)), default=math.inf
        )
        self.has_eos = any(hasattr(each, "eos_token_id") for each in criteria)
        self.all_known = not self._unknown

    def unserved(self) -> str | None:
        """Return the class that cannot be asked row by row in this batch, None if there is none.

        Without an eos criterion plain goes on with finished rows until all have finished. Only
        criteria that end all rows at the same length are served then.
        """
        if self._num_rows == 1:
            return None
        if self._unknown:
            return type(self._unknown[0]).__name__
        uneven = [each for each in self._criteria if type(each) in _UNEVEN]
        return type(uneven[0]).__name__ if uneven and not self.has_eos else None

    def stops(
        self,
        token_id: int,
        num_columns: int,
        ids: Callable[[], torch.Tensor],
        scores: Callable[[], Any],
    ) -> bool:
        """Return whether the row's text ends with the token that it has just emitted.

        `num_columns` are those in plain's batch, prompt pads and the newest token included. `ids`
        returns the row as plain holds it, [1, columns], and `scores` what plain passes to criteria;
        both are called only if needed.
        """
        if self._unknown:
            prefix = ids()
            unfinished = torch.ones(1, dtype=torch.long, device=prefix.device)
            return bool((unfinished & ~self._criteria(prefix, scores())).max() == 0)
        ended = num_columns >= self._max_length
        if self._times:
            ended |= any(time.time() - c.initial_timestamp > c.max_time for c in self._times)
        ended |= token_id in self._eos
        ended = ended or any(c.end_with(token_id, ids) for c in self._strings)
        return ended or any(bool(c(ids(), None)[0]) for c in self._texts)

    def ended(self, ids: torch.Tensor, going: np.ndarray, scores: Any) -> np.ndarray:
        """Ask all criteria about a batch, as plain does; return the rows that have ended, [rows].

        `ids` are the batch as plain holds it, [rows, columns]; `going` the rows that no criterion
        has ended so far, [rows] bool; `scores` what plain passes to criteria.
        """
        unfinished = torch.from_numpy(going.astype(np.int64)).to(ids.device)
        unfinished = unfinished & ~self._criteria(ids, scores)
        return unfinished.to("cpu").numpy() == 0


class _StopStrings:
    """A stop string criterion that is asked only after tokens that can end a stop string."""

    def __init__(self, criterion: hf.StopStringCriteria) -> None:
        self._criterion = criterion
        first = criterion.max_valid_positions * criterion.num_stop_strings
        ends = criterion.embedding_vec[:, first:-1]  # [vocab + 1, strings * ends]
        self._can_end = (ends > 0).any(1).cpu().numpy()
        self._always = bool((criterion.target_lens <= 0).any())

    def end_with(self, token_id: int, ids: Callable[[], torch.Tensor]) -> bool:
        """Return whether the row's text ends in one of the strings."""
        token = min(token_id, len(self._can_end) - 1)
        if not self._can_end[token] and not self._always:
            return False
        return bool(self._criterion(ids(), None)[0])
