"""Calls logits processors row by row: which of them can be, and the fastest way."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers.generation import logits_process as hf

from lookahead_hf.logits.constraints import Constraint, recognise
from lookahead_hf.logits.warpers import twin

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(ids [1, columns], scores [1, vocab]) -> scores [1, vocab]`."""


class PresencePenalty(hf.LogitsProcessor):
    """Lowers the scores of tokens that the text has after its prompt, as OpenAI's API does."""

    def __init__(self, penalty: float, num_prompt: int) -> None:
        """`num_prompt`: tokens of the prompt, which do not count."""
        self.penalty, self.num_prompt = penalty, num_prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, [rows, vocab], for texts, [rows, columns]."""
        written = input_ids[:, self.num_prompt :]
        found = torch.zeros_like(scores).scatter_(1, written, self.penalty)
        return scores - found


SCORES_ONLY = frozenset(
    {
        hf.BarkEosPrioritizerLogitsProcessor,
        hf.EpsilonLogitsWarper,
        hf.EtaLogitsWarper,
        hf.InfNanRemoveLogitsProcessor,
        hf.LogitNormalization,
        hf.MinPLogitsWarper,
        hf.SuppressTokensLogitsProcessor,
        hf.TemperatureLogitsWarper,
        hf.TopHLogitsWarper,
        hf.TopKLogitsWarper,
        hf.TopPLogitsWarper,
        hf.TypicalLogitsWarper,
    }
)
"""Processors that depend on the scores alone; subclasses do not count."""

_BY_PREFIX = frozenset(
    {
        hf.AlternatingCodebooksLogitsProcessor,
        hf.ExponentialDecayLengthPenalty,
        hf.ForcedBOSTokenLogitsProcessor,
        hf.ForcedEOSTokenLogitsProcessor,
        hf.MinLengthLogitsProcessor,
        hf.MinNewTokensLengthLogitsProcessor,
        hf.NoBadWordsLogitsProcessor,
        hf.NoRepeatNGramLogitsProcessor,
        hf.RepetitionPenaltyLogitsProcessor,
        hf.SequenceBiasLogitsProcessor,
        hf.SuppressTokensAtBeginLogitsProcessor,
        hf.WatermarkLogitsProcessor,
        hf.WhisperTimeStampLogitsProcessor,
        PresencePenalty,
    }
)
"""Processors that depend on the scores and the row's own prefix; subclasses do not count."""

_SUM_OVER_VOCAB = frozenset({hf.EtaLogitsWarper, hf.TypicalLogitsWarper})
"""Processors whose sums a CPU splits over its threads for one row, but not for several."""


class RowProcessors:
    """One call's logits processors, for rows that advance by different counts.

    A batch of one row calls the list itself if it contains anything unknown: a custom class, or one
    that calls a function of the user. A larger batch needs classes whose result for a row depends
    on that row alone. A processor that obeys a grammar is replaced by one per row, and `end` brings
    the caller's up to date.
    """

    def __init__(self, processors: hf.LogitsProcessorList, num_rows: int) -> None:
        self._processors = processors
        self.num_rows = num_rows
        self._constraints = {
            id(each): constraint
            for each in processors
            if (constraint := recognise(each, num_rows)) and constraint.alone
        }
        self._unknown = _first_unknown(processors, num_rows, self._constraints)
        self._chains: list[list[Processor]] = []  # per row, built once the device is known
        self._scores: torch.Tensor | None = None  # the latest ones, if their shape is needed

    @functools.cached_property
    def _by_row(self) -> list[list[Processor]]:
        return [[self._bound(p, row) for p in self._processors] for row in range(self.num_rows)]

    def _bound(self, processor: Any, row: int) -> Any:
        """Return the processor of one row; a repetition penalty holds a length for each."""
        constraint = self._constraints.get(id(processor))
        if constraint is not None and constraint.alone is not None and self.num_rows > 1:
            return constraint.alone(row)
        ignored = getattr(processor, "prompt_ignore_length", None)
        if not isinstance(ignored, torch.Tensor):
            return processor
        bound = copy.copy(processor)
        bound.prompt_ignore_length = ignored[row : row + 1]
        return bound

    def __iter__(self) -> Iterator[Processor]:
        return iter(self._processors)

    @property
    def empty(self) -> bool:
        return len(self._processors) == 0 and self._unknown is None

    @property
    def all_known(self) -> bool:
        """Whether every class is known; an unknown one may draw random numbers."""
        return self._unknown is None

    def unserved(self) -> str | None:
        """Return the class that cannot be called row by row, None if all can.

        In a batch, any class not known to be row-independent may mix rows, or keep a cache for
        which rows must stay in step.
        """
        return self._unknown if self.num_rows > 1 else None

    def __call__(self, row: int, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores that plain generation's batched call returns for a row, [1, vocab].

        `ids` are the row's prefix, [1, columns], `scores` its scores, [1, vocab] float32.
        """
        if self._unknown is not None:
            return self._processors(ids, scores)
        self._scores = scores
        if not self._chains:
            self._chains = [self._chain(each, scores.device) for each in self._by_row]
        for processor in self._chains[row]:
            scores = processor(ids, scores)
        return scores

    @property
    def keeps_state(self) -> bool:
        """Whether a processor of the caller is brought up to date at the end only."""
        return self.num_rows > 1 and bool(self._constraints)

    def end(self, ids: torch.Tensor, texts: Sequence[list[int]]) -> None:
        """Leave the caller's processors as plain generation does; see `Constraint.settle`."""
        if self.keeps_state and self._unknown is None and self._scores is not None:
            shape = self.num_rows, self._scores.shape[-1]
            for constraint in self._constraints.values():
                constraint.settle(ids, self._scores.new_zeros(shape), texts)

    def _chain(self, bound: list[Processor], device: torch.device) -> list[Processor]:
        """Return a row's processors, on a CPU the fastest, that round as in a batch."""
        if device.type == "cpu":
            bound = [twin(processor) for processor in bound]
        if self.num_rows == 1:
            return bound
        # On an accelerator the number of rows decides how any sum is divided.
        kinds, rows = (_SUM_OVER_VOCAB, 2) if device.type == "cpu" else (SCORES_ONLY, self.num_rows)
        return [functools.partial(_as_in_batch, p, rows) if type(p) in kinds else p for p in bound]


def check_scores(scores: Any, do_sample: bool) -> None:
    """Raise what plain `generate` raises if a caller's processor returned no [rows, vocab]."""
    if isinstance(scores, torch.Tensor) and scores.dim() == 2:
        return
    if do_sample:
        torch.multinomial(torch.nn.functional.softmax(scores, dim=-1), 1).squeeze(1)[:, None]
    else:
        torch.argmax(scores, dim=-1)[:, None]


def _first_unknown(
    processors: hf.LogitsProcessorList, num_rows: int, constraints: Mapping[int, Constraint]
) -> str | None:
    if type(processors) is not hf.LogitsProcessorList:
        return type(processors).__name__
    unknown = (p for p in processors if not knows_processor(p, num_rows))
    return next((type(p).__name__ for p in unknown if id(p) not in constraints), None)


def knows_processor(processor: Any, num_rows: int = 1) -> bool:
    """Return whether a row's result depends on that row and the processor's state of it alone."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    fits = not isinstance(ignored, torch.Tensor) or len(ignored) == num_rows
    return fits and type(processor) in SCORES_ONLY | _BY_PREFIX


def _as_in_batch(
    processor: Any, rows: int, ids: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """Call a scores-only processor on several rows, since one row may round differently."""
    no_ids = ids.new_empty(rows, 0)
    return processor(no_ids, scores.repeat(rows, 1))[:1]
