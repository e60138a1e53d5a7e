"""Called row by row, processors return what plain's batched call returns, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

import lookahead_hf
from lookahead_hf.logits import row_processors
from lookahead_hf.logits.row_processors import PresencePenalty, RowProcessors
from tests.helpers.calls import GREEDY, padded
from tests.helpers.compared import compared
from tests.helpers.models import prompt, tiny
from tests.helpers.users_parts import EditsText

ROWS, COLUMNS, VOCAB = 4, 14, 1009
PAD = 0
WHISPER = SimpleNamespace(
    no_timestamps_token_id=900, eos_token_id=890, bos_token_id=1, max_initial_timestamp_index=20
)


MAKERS: dict[str, Callable[[], Any]] = {
    "temperature": lambda: hf.TemperatureLogitsWarper(0.7),
    "top_k": lambda: hf.TopKLogitsWarper(50),
    "top_k_all": lambda: hf.TopKLogitsWarper(5000),
    "top_p": lambda: hf.TopPLogitsWarper(0.9),
    "top_p_small": lambda: hf.TopPLogitsWarper(0.05, min_tokens_to_keep=3),
    "top_h": lambda: hf.TopHLogitsWarper(0.4),
    "min_p": lambda: hf.MinPLogitsWarper(0.05, min_tokens_to_keep=2),
    "typical": lambda: hf.TypicalLogitsWarper(0.8),
    "epsilon": lambda: hf.EpsilonLogitsWarper(3e-4),
    "eta": lambda: hf.EtaLogitsWarper(3e-3),
    "inf_nan": hf.InfNanRemoveLogitsProcessor,
    "normalize": hf.LogitNormalization,
    "suppress": lambda: hf.SuppressTokensLogitsProcessor([1, 7, 99]),
    "bark_eos": lambda: hf.BarkEosPrioritizerLogitsProcessor(3, 1e-3),
    "min_length": lambda: hf.MinLengthLogitsProcessor(COLUMNS + 1, [2, 3]),
    "min_length_reached": lambda: hf.MinLengthLogitsProcessor(COLUMNS, 2),
    "min_new_tokens": lambda: hf.MinNewTokensLengthLogitsProcessor(COLUMNS - 3, 5, [2]),
    "forced_bos": lambda: hf.ForcedBOSTokenLogitsProcessor(4),
    "forced_eos": lambda: hf.ForcedEOSTokenLogitsProcessor(COLUMNS + 1, [2]),
    "decay": lambda: hf.ExponentialDecayLengthPenalty((2, 1.2), [2, 9], COLUMNS - 5),
    "suppress_at_begin": lambda: hf.SuppressTokensAtBeginLogitsProcessor([5, 6], COLUMNS),
    "presence": lambda: PresencePenalty(0.7, 2),
    "repetition": lambda: hf.RepetitionPenaltyLogitsProcessor(1.3),
    "repetition_pads": lambda: hf.RepetitionPenaltyLogitsProcessor(1.3, torch.tensor([0, 3, 7, 1])),
    "repetition_cut": lambda: hf.RepetitionPenaltyLogitsProcessor(1.3, 4),
    "no_repeat_ngram": lambda: hf.NoRepeatNGramLogitsProcessor(2),
    "sequence_bias": lambda: hf.SequenceBiasLogitsProcessor([[[3], -2.0], [[7, 9], 4.0]]),
    "bad_words": lambda: hf.NoBadWordsLogitsProcessor([[3], [7, 9]], 2),
    "watermark": lambda: hf.WatermarkLogitsProcessor(VOCAB, "cpu"),
    "watermark_selfhash": lambda: hf.WatermarkLogitsProcessor(
        VOCAB, "cpu", seeding_scheme="selfhash", context_width=3
    ),
    "whisper_timestamps": lambda: hf.WhisperTimeStampLogitsProcessor(WHISPER, COLUMNS - 2),
    "codebooks": lambda: hf.AlternatingCodebooksLogitsProcessor(3, 100, 400),
}


def logits(kind: str, rows: int = ROWS, vocab: int = VOCAB) -> torch.Tensor:
    """Scores of a step: in fp32, rounded to bf16 as in half-precision models, or with ties."""
    scores = 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows * vocab))
    if kind == "bf16":
        return scores.bfloat16().float()
    if kind == "tied":
        return scores.round()
    return scores


def prefixes(rows: int = ROWS) -> torch.Tensor:
    """Left-padded ids with repetitions, some of them timestamps for Whisper."""
    ids = torch.randint(1, 12, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(5))
    for row in range(ROWS):
        ids[row, :row] = PAD
    ids[1, -1] = 903
    ids[2, -2:] = torch.tensor([902, 905])
    return ids[:rows]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.contiguous().view(torch.int32))


def every_row_equals(processors: hf.LogitsProcessorList, fresh: RowProcessors, kind: str) -> bool:
    ids, scores = prefixes(), logits(kind)
    expected = processors(ids, scores.clone())
    return all(
        same_bits(fresh(row, ids[row : row + 1], scores[row : row + 1].clone())[0], expected[row])
        for row in reversed(range(ROWS))
    )


@pytest.mark.parametrize("kind", ["fp32", "bf16", "tied"])
@pytest.mark.parametrize("name", MAKERS)
def test_every_known_class_equals_plains_batch(name: str, kind: str):
    make = MAKERS[name]
    ours = RowProcessors(hf.LogitsProcessorList([make()]), ROWS)
    assert ours.unserved() is None
    assert every_row_equals(hf.LogitsProcessorList([make()]), ours, kind)


def test_the_makers_cover_every_known_class():
    known = row_processors.SCORES_ONLY | row_processors._BY_PREFIX
    assert {type(make()) for make in MAKERS.values()} == known


@pytest.mark.parametrize("name", ["typical", "eta", "top_p", "normalize", "whisper_timestamps"])
def test_a_long_vocabulary_rounds_as_in_the_batch_with_several_threads(name: str):
    torch.set_num_threads(2)
    try:
        processor = MAKERS[name]()
        ours = RowProcessors(hf.LogitsProcessorList([processor]), 3)
        ids, scores = prefixes(3), logits("fp32", 3, 49152)
        expected = processor(ids, scores.clone())
        for row in range(3):
            found = ours(row, ids[row : row + 1], scores[row : row + 1].clone())
            assert same_bits(found[0], expected[row])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "tied"])
def test_a_whole_list_is_applied_in_order(kind: str):
    names = ["repetition_pads", "no_repeat_ngram", "min_new_tokens", "temperature", "top_k"]
    names += ["top_p", "min_p"]
    plain, given = (hf.LogitsProcessorList([MAKERS[n]() for n in names]) for _ in range(2))
    ours = RowProcessors(given, ROWS)
    assert every_row_equals(plain, ours, kind)


class Counting(hf.LogitsProcessor):
    """Depends on how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores + self.calls


class OwnTopK(hf.TopKLogitsWarper):
    """A subclass may do anything."""


def test_an_unknown_class_is_served_alone_and_named_in_a_batch():
    callers = hf.PrefixConstrainedLogitsProcessor(lambda row, prefix: [row], 1)
    by_row = hf.RepetitionPenaltyLogitsProcessor(1.2, torch.tensor([1, 2, 3]))
    for unknown in (Counting(), OwnTopK(5), callers, by_row):
        processors = hf.LogitsProcessorList([hf.TemperatureLogitsWarper(0.5), unknown])
        assert RowProcessors(processors, 2).unserved() == type(unknown).__name__
        assert RowProcessors(processors, 1).unserved() is None
        assert not RowProcessors(processors, 1).all_known
    counting = Counting()
    alone = RowProcessors(hf.LogitsProcessorList([counting]), 1)
    scores = logits("fp32", 1)
    for calls in (1, 2, 3):
        assert same_bits(alone(0, prefixes(1), scores), scores + calls)


def test_a_list_of_another_class_counts_as_unknown():
    class OwnList(hf.LogitsProcessorList):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            return scores * 2

    assert RowProcessors(OwnList(), 2).unserved() == "OwnList"
    alone, scores = RowProcessors(OwnList(), 1), logits("fp32", 1)
    assert same_bits(alone(0, prefixes(1), scores), scores * 2)
    assert not alone.empty


class Returns(LogitsProcessor):
    """Returns what a function makes of the scores."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        return self.make(scores)


@pytest.mark.parametrize("drawn", [{"do_sample": False}, {"do_sample": True, "temperature": 0.6}])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("make", [lambda _: None, lambda _: 3, lambda scores: scores[0]])
def test_a_processor_that_returns_no_scores_raises_plains_error(
    make: Any, rows: int, drawn: dict[str, Any]
) -> None:
    model = lookahead_hf.enable(tiny("llama"))
    call = {"inputs": prompt(rows), "max_new_tokens": 4, "pad_token_id": 0, **drawn}
    call["logits_processor"] = LogitsProcessorList([Returns(make)])
    said = []
    for speculative in (False, True):
        with pytest.raises((TypeError, IndexError, AttributeError)) as raised:
            model.generate(**call, speculative=speculative)
        said.append((raised.type, str(raised.value)))
    assert said[0] == said[1]


@pytest.mark.parametrize("rows", [1, 3])
def test_other_processors_hold_the_prompt_that_is_edited(rows: int) -> None:
    """`generate` gives it to them without a copy, and it is the caller's."""
    call = {**GREEDY, "encoder_repetition_penalty": 0.1, "logits_processor": [EditsText()]}
    prompts: list[torch.Tensor] = []

    def arguments() -> dict[str, Any]:
        inputs = padded("left", rows)
        prompts.append(inputs["input_ids"])
        return {**inputs, **call}

    compared(tiny("llama"), arguments, 14)
    of_plain, of_ours = prompts
    assert torch.equal(of_plain, of_ours)
    assert not torch.equal(of_ours, padded("left", rows)["input_ids"])
