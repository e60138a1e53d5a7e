"""Logits processors called row by row: which of them can be, and a copy bound to each row."""

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
        hf.SequenceBiasLogitsProcessor,
        hf.SuppressTokensAtBeginLogitsProcessor,
        hf.WatermarkLogitsProcessor,
        hf.WhisperTimeStampLogitsProcessor,
    }
)
"""Processors that depend on the scores and the row's own prefix; subclasses do not count."""

_SUM_OVER_VOCAB = frozenset({hf.EtaLogitsWarper, hf.TypicalLogitsWarper})
"""Processors whose sums a CPU splits over its threads for one row, but not for several rows."""

_SHARES_TEXTS = version.parse(transformers.__version__) >= version.parse("5.23")
"""Whether an encoder penalty with one text applies to all rows; in 5.17 it is the first only."""


class RowProcessors:
    """One call's logits processors, for rows that advance by different counts.

    A batch of one row calls the list itself if it contains anything unknown: a custom class, or one
    that calls a function of the user. In a larger batch each row has its own processors: the given
    ones if a row's result depends on that row alone, else copies bound to the row's share of what
    the processor holds.

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
        self._bound: list[list[Processor]] = []  # per row, built once the device is known

    @property
    def empty(self) -> bool:
        """Whether the processors leave the logits unchanged."""
        return len(self._processors) == 0 and self._unknown is None

    @property
    def scores_only(self) -> bool:
        """Whether all processors depend on the scores alone."""
        known = self._unknown is None
        return known and all(type(p) in SCORES_ONLY for p in self._processors)

    @property
    def all_known(self) -> bool:
        """Whether every class is known; an unknown one may draw random numbers."""
        return self._unknown is None

    def unserved(self) -> str | None:
        """Return the class that cannot be called row by row, None if all can.

        A processor that runs the model keeps a cache, for which rows must stay in step. In a batch,
        any class that is not known to be row-independent may mix rows.
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
        """Return what plain's batched call returns for the row after this prefix, [1, vocab]."""
        if self._unknown is not None:
            return self._processors(ids, scores)
        if not self._bound:
            self._bound = [self._chain(r, scores.device) for r in range(self.num_rows)]
        for processor in self._bound[row]:
            scores = processor(ids, scores)
        return scores

    def at_once(self, scores: torch.Tensor) -> torch.Tensor:
        """Apply processors that are `scores_only` to any number of rows, [rows, vocab]."""
        assert self.scores_only
        ids = torch.empty(len(scores), 0, dtype=torch.long, device=scores.device)
        for processor in self._processors:
            scores = processor(ids, scores)
        return scores

    def of_rows(
        self,
        rows: list[int],
        ids: Callable[[int], torch.Tensor],
        scores: torch.Tensor,
    ) -> torch.Tensor:
        """Apply processors of known classes to some rows, in as few calls as possible.

        Args:
            rows: Indices of the rows.
            ids: Returns a row's prefix, [1, columns].
            scores: Their scores, [len(rows), vocab] float32.
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
        """Call with as many rows as plain's batch has: accelerators choose their sums by that."""
        missing = self.num_rows - len(scores)
        filled = torch.cat([scores, scores[:1].expand(missing, -1)]) if missing else scores
        no_ids = torch.empty(self.num_rows, 0, dtype=torch.long, device=scores.device)
        return processor(no_ids, filled)[: len(scores)]

    @functools.cached_property
    def _each(self) -> list[list[Processor]]:
        """Every processor as bound to each row of the batch."""
        each_row = range(self.num_rows)
        return [[_bind(p, row, self.num_rows) for p in self._processors] for row in each_row]

    def _chain(self, row: int, device: torch.device) -> list[Processor]:
        """Return the row's processors, on a CPU the fastest that round as in plain's batch."""
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
    """Return the processor bound to one row of the batch."""
    binder = _BINDERS.get(type(processor))
    return processor if binder is None else binder[1](processor, row, num_rows)


def _as_in_batch(processor: Any, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Call a scores-only processor on two rows, since a CPU rounds one row in another way."""
    return processor(ids, scores.repeat(2, 1))[:1]


def _repetition_serves(processor: Any, num_rows: int) -> bool:
    ignored = processor.prompt_ignore_length
    return not isinstance(ignored, torch.Tensor) or len(ignored) == num_rows


def _bind_repetition(processor: Any, row: int, num_rows: int) -> Processor:
    ignored = processor.prompt_ignore_length
    if not isinstance(ignored, torch.Tensor):
        return processor
    return _changed(processor, prompt_ignore_length=ignored[row : row + 1])


def _encoder_repetition_serves(processor: Any, num_rows: int) -> bool:
    num_texts = len(processor.encoder_input_ids)
    return num_rows == num_texts or (_SHARES_TEXTS and num_rows % num_texts == 0)


def _bind_encoder_repetition(processor: Any, row: int, num_rows: int) -> Processor:
    texts = processor.encoder_input_ids
    source = row // (num_rows // len(texts))
    return _changed(processor, encoder_input_ids=texts[source : source + 1])


def _encoder_ngrams_serve(processor: Any, num_rows: int) -> bool:
    return num_rows % processor.batch_size == 0


def _bind_encoder_ngrams(processor: Any, row: int, num_rows: int) -> Processor:
    ngrams = processor.generated_ngrams[row // (num_rows // processor.batch_size)]
    return _changed(processor, batch_size=1, generated_ngrams=[ngrams])


def _changed(processor: Any, **fields: Any) -> Processor:
    changed = copy.copy(processor)
    vars(changed).update(fields)
    return changed


_BINDERS: dict[type, tuple[Callable[[Any, int], bool], Callable[[Any, int, int], Processor]]] = {
    hf.EncoderNoRepeatNGramLogitsProcessor: (_encoder_ngrams_serve, _bind_encoder_ngrams),
    hf.EncoderRepetitionPenaltyLogitsProcessor: (
        _encoder_repetition_serves,
        _bind_encoder_repetition,
    ),
    hf.RepetitionPenaltyLogitsProcessor: (_repetition_serves, _bind_repetition),
}
"""For processors that hold something per row: whether it fits the rows, and a row's copy."""
