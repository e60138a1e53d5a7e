"""Logits processors asked row by row: which of them can be, and each row's own binding of them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging import version
from transformers.generation import logits_process as hf

from lookahead_hf.logits.warpers import fuse

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(ids [1, columns], scores [1, vocab]) -> scores [1, vocab]`."""

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
"""Processors, by exact type, that look at nothing but the scores."""

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
        hf.SequenceBiasLogitsProcessor,
        hf.SuppressTokensAtBeginLogitsProcessor,
        hf.WatermarkLogitsProcessor,
        hf.WhisperTimeStampLogitsProcessor,
    }
)
"""Processors, by exact type, that look at the row's own prefix too."""

_SUM_OVER_VOCAB = frozenset({hf.EtaLogitsWarper, hf.TypicalLogitsWarper})
"""Of these a CPU sums one row in pieces, one per thread, but a row of several in one go."""


_SHARES_TEXTS = version.parse(transformers.__version__) >= version.parse("5.23")
"""Whether an encoder penalty of one text serves several rows; 5.17 penalises the first only."""


class RowProcessors:
    """One call's logits processors, for rows that advance by different counts.

    A batch of one row calls the list itself where it holds anything unknown: a class of somebody
    else's, or one that asks a function of the caller's. In a larger batch each row has processors
    of its own: the given ones where a row's result depends on that row alone, else copies bound to
    what the batch holds for the row.

    Attributes:
        num_rows: Rows of the batch.
    """

    def __init__(
        self, processors: hf.LogitsProcessorList, num_rows: int, prompt_columns: int
    ) -> None:
        """`prompt_columns`: columns of the prompt that the processors were made for."""
        self._processors = processors
        self.num_rows = num_rows
        self._unknown = _first_unknown(processors, num_rows)
        self._bound: list[list[Processor]] = []  # per row, made when the device is known

    @property
    def empty(self) -> bool:
        """Whether the scores are the logits."""
        return len(self._processors) == 0 and self._unknown is None

    @property
    def scores_only(self) -> bool:
        """Whether no processor looks at the prefix."""
        known = self._unknown is None
        return known and all(type(p) in SCORES_ONLY for p in self._processors)

    @property
    def all_known(self) -> bool:
        """Whether every class is known; one that is not may draw random numbers of its own."""
        return self._unknown is None

    def unserved(self) -> str | None:
        """Name of the class that keeps this call from being asked row by row; None if none does.

        One that runs the model itself keeps a cache that must not see rows out of step; in a batch
        any class that is not known, by exact type, to be row-independent may mix rows.
        """
        for processor in self._processors:
            if isinstance(processor, hf.UnbatchedClassifierFreeGuidanceLogitsProcessor):
                return type(processor).__name__
        return self._unknown if self.num_rows > 1 else None

    def __call__(
        self,
        row: int,
        ids: torch.Tensor,  # [1, columns]
        scores: torch.Tensor,  # [1, vocab] float32
    ) -> torch.Tensor:
        """What plain's batched call gives the row after this prefix, [1, vocab]."""
        if self._unknown is not None:
            return self._processors(ids, scores)
        if not self._bound:
            self._bound = [self._chain(r, scores.device) for r in range(self.num_rows)]
        for processor in self._bound[row]:
            scores = processor(ids, scores)
        return scores

    def at_once(self, scores: torch.Tensor) -> torch.Tensor:
        """What processors that are `scores_only` make of any number of rows, [rows, vocab]."""
        assert self.scores_only
        ids = torch.empty(len(scores), 0, dtype=torch.long, device=scores.device)
        for processor in self._processors:
            scores = processor(ids, scores)
        return scores

    def of_rows(
        self,
        rows: list[int],
        ids: Callable[[int], torch.Tensor],
        scores: torch.Tensor,  # [rows that are asked, vocab] float32
    ) -> torch.Tensor:
        """The same for some rows in as few calls as can be, where all classes are known.

        Args:
            rows: The rows that are asked.
            ids: Makes a row's prefix, [1, columns].
            scores: Theirs.
        """
        assert self._unknown is None
        for index, processor in enumerate(self._processors):
            if type(processor) in SCORES_ONLY:
                scores = self._in_full(processor, scores)
            else:
                each = zip(rows, scores.split(1), strict=True)
                scores = torch.cat([self._each[row][index](ids(row), own) for row, own in each])
        return scores

    def _in_full(self, processor: Processor, scores: torch.Tensor) -> torch.Tensor:
        """Call on as many rows as plain's batch has: accelerators choose by it how to reduce."""
        missing = self.num_rows - len(scores)
        filled = torch.cat([scores, scores[:1].expand(missing, -1)]) if missing else scores
        no_ids = torch.empty(self.num_rows, 0, dtype=torch.long, device=scores.device)
        return processor(no_ids, filled)[: len(scores)]

    @functools.cached_property
    def _each(self) -> list[list[Processor]]:
        """Every processor as each row of the batch meets it."""
        each_row = range(self.num_rows)
        return [[_bind(p, row, self.num_rows) for p in self._processors] for row in each_row]

    def _chain(self, row: int, device: torch.device) -> list[Processor]:
        """The row's processors; on a CPU the fastest that round as in plain's batch."""
        chain = self._each[row]
        if device.type != "cpu":
            return chain
        if self.num_rows > 1:
            shaped = _SUM_OVER_VOCAB
            chain = [functools.partial(_as_in_batch, p) if type(p) in shaped else p for p in chain]
        return fuse(chain)


def _first_unknown(processors: hf.LogitsProcessorList, num_rows: int) -> str | None:
    if type(processors) is not hf.LogitsProcessorList:
        return type(processors).__name__
    for processor in processors:
        kind = type(processor)
        if kind in SCORES_ONLY or kind in _BY_PREFIX:
            continue
        if kind not in _BINDERS or not _BINDERS[kind][0](processor, num_rows):
            return kind.__name__
    return None


def _bind(processor: Any, row: int, num_rows: int) -> Processor:
    """The processor as `row` of the batch meets it."""
    binder = _BINDERS.get(type(processor))
    return processor if binder is None else binder[1](processor, row, num_rows)


def _as_in_batch(processor: Any, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Call a scores-only processor so that a CPU, which tells one row from several, rounds so."""
    return processor(ids, scores.repeat(2, 1))[:1]


def _repetition_serves(processor: Any, num_rows: int) -> bool:
    ignored = processor.prompt_ignore_length
    return not isinstance(ignored, torch.Tensor) or len(ignored) == num_rows


def _bind_repetition(processor: Any, row: int, num_rows: int) -> Processor:
    if not isinstance(processor.prompt_ignore_length, torch.Tensor):
        return processor
    bound = copy.copy(processor)
    bound.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
    return bound


def _encoder_repetition_serves(processor: Any, num_rows: int) -> bool:
    num_texts = len(processor.encoder_input_ids)
    return num_rows == num_texts or (_SHARES_TEXTS and num_rows % num_texts == 0)


def _bind_encoder_repetition(processor: Any, row: int, num_rows: int) -> Processor:
    bound = copy.copy(processor)
    source = row // (num_rows // len(processor.encoder_input_ids))
    bound.encoder_input_ids = processor.encoder_input_ids[source : source + 1]
    return bound


def _encoder_ngrams_serve(processor: Any, num_rows: int) -> bool:
    return num_rows % processor.batch_size == 0


def _bind_encoder_ngrams(processor: Any, row: int, num_rows: int) -> Processor:
    bound = copy.copy(processor)
    bound.batch_size = 1
    bound.generated_ngrams = [processor.generated_ngrams[row // (num_rows // processor.batch_size)]]
    return bound


_BINDERS: dict[type, tuple[Callable[[Any, int], bool], Callable[[Any, int, int], Processor]]] = {
    hf.EncoderNoRepeatNGramLogitsProcessor: (_encoder_ngrams_serve, _bind_encoder_ngrams),
    hf.EncoderRepetitionPenaltyLogitsProcessor: (
        _encoder_repetition_serves,
        _bind_encoder_repetition,
    ),
    hf.RepetitionPenaltyLogitsProcessor: (_repetition_serves, _bind_repetition),
}
"""What the batch holds per row: whether that fits the rows, and the copy for one row."""
