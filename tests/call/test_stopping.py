"""Row by row, stopping criteria answer as plain `generate` would have them answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation import stopping_criteria as hf

from lookahead_hf.call import stopping as stopping_module
from lookahead_hf.call.stopping import RowStopping, StopTexts

WORDS = ["a", "b", "c", "st", "op", "stop", "sto", "pped", "opera", "s", "t", "o", "p", "ab"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(WORDS))
    vocab = {word: index for index, word in enumerate([*WORDS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def asked(stopping: RowStopping, ids: torch.Tensor, scores: Any = None) -> bool:
    return stopping.stops(int(ids[0, -1]), ids.shape[1], lambda: ids, lambda: scores)


def plain_stops(criteria: hf.StoppingCriteriaList, ids: torch.Tensor, scores: Any = None) -> bool:
    """The two lines of plain's loop, for one row."""
    unfinished = torch.ones(1, dtype=torch.long)
    unfinished = unfinished & ~criteria(ids, scores)
    return bool(unfinished.max() == 0)


def never() -> torch.Tensor:
    raise AssertionError("the prefix was made where the token and the length decide")


@pytest.mark.parametrize("eos", [2, [2], [2, 5], torch.tensor([2, 5]), torch.tensor(2)])
def test_eos_and_length_are_decided_without_the_prefix(eos: Any):
    criteria = hf.StoppingCriteriaList([hf.EosTokenCriteria(eos), hf.MaxLengthCriteria(9)])
    ours = RowStopping(criteria, 3)
    assert ours.unserved() is None and ours.has_eos
    assert ours.all_known
    for token in range(7):
        for columns in (1, 8, 9, 10):
            ids = torch.full((1, columns), 3)
            ids[0, -1] = token
            assert ours.stops(token, columns, never, None) == plain_stops(criteria, ids)


def test_stop_strings_stop_after_exactly_the_tokens_that_complete_them(
    tokenizer: PreTrainedTokenizerFast,
):
    criteria = hf.StoppingCriteriaList(
        [hf.StopStringCriteria(tokenizer, ["stop", "ab"]), hf.EosTokenCriteria(15)]
    )
    ours = RowStopping(criteria, 2)
    assert ours.unserved() is None
    generator = torch.Generator().manual_seed(0)
    stopped = 0
    for _ in range(300):
        ids = torch.randint(0, len(WORDS) + 3, (1, 6), generator=generator)
        expected = plain_stops(criteria, ids)
        stopped += expected
        assert asked(ours, ids) == expected
    assert 20 < stopped < 280


def test_time_is_read_after_every_token(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(stopping_module.time, "time", lambda: now[0])
    criteria = hf.StoppingCriteriaList([hf.MaxTimeCriteria(5.0), hf.EosTokenCriteria(2)])
    ours = RowStopping(criteria, 2)
    assert ours.unserved() is None
    answers = []
    for now[0] in (101.0, 105.0, 105.1):
        answers.append(ours.stops(3, 4, never, None))
        assert answers[-1] == plain_stops(criteria, torch.full((1, 4), 3))
    assert answers == [False, False, True]


class LastIsEven(hf.StoppingCriteria):
    """A class that nobody knows."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        return input_ids[:, -1] % 2 == 0


def test_a_batch_names_the_class_that_cannot_be_asked_row_by_row(
    tokenizer: PreTrainedTokenizerFast,
):
    eos, length = hf.EosTokenCriteria(2), hf.MaxLengthCriteria(9)
    strings = hf.StopStringCriteria(tokenizer, "stop")

    class OwnEos(hf.EosTokenCriteria):
        """A subclass may do anything."""

    def named(*criteria: hf.StoppingCriteria, rows: int = 2) -> str | None:
        return RowStopping(hf.StoppingCriteriaList(criteria), rows).unserved()

    assert named(length, eos, LastIsEven()) == "LastIsEven"
    assert named(OwnEos(2)) == "OwnEos"
    assert named(length, strings, eos) is None
    assert named(length) is None
    # Without eos plain lets a finished row go on.
    assert named(length, strings) == "StopStringCriteria"
    assert named(length, hf.MaxTimeCriteria(1.0)) == "MaxTimeCriteria"
    assert named(length, strings, rows=1) is None


def test_a_stop_string_may_have_more_tokens_than_characters(tokenizer: Any) -> None:
    ids = torch.tensor([tokenizer("再见，谢谢大家的时间").input_ids])
    assert StopTexts(["再见，谢谢大家的时间"], tokenizer, 0)(ids, None).all()
