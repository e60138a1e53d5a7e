"""An assistant writes ahead in ragged batches, and its cache follows what the target decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lookahead_hf.drafting.drafter import TargetCall
from lookahead_hf.rows import Rows
from lookahead_hf.sources.assistant import AssistantDrafter
from tests.helpers.architectures import build
from tests.helpers.drafts import paths, rows_of
from tests.helpers.models import VOCAB, characters, prompt, tiny

TEXTS = [prompt(length=30, seed=row)[0].tolist() for row in range(3)]
LENGTHS = [5, 9, 2]


def logits_after(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """The model's own logits, [vocab]."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(tokens)])).logits[0, -1]


def begun(model: Any, rows: Rows, **options: Any) -> AssistantDrafter:
    drafter = AssistantDrafter(model, **{"min_reach": 0.0, "num_draft": 4, **options})
    drafter.begin(rows)
    return drafter


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "gpt2"])
def test_drafts_are_what_the_model_would_write_in_every_step(name: str) -> None:
    model = tiny(name)
    rows = rows_of([text[:length] for text, length in zip(TEXTS, LENGTHS, strict=True)])
    drafter = begun(model, rows)
    for step in range(4):
        tree = drafter.propose(rows, 64)
        for row in range(3):  # row 0 accepts it all, row 1 a part, row 2 nothing
            drafted, context = paths(tree, row)[-1], rows.context(row).tolist()
            assert len(drafted) == np.diff(tree.row_offsets)[row] == 4
            for at, token in enumerate(drafted):
                assert token == logits_after(model, [*context, *drafted[:at]]).argmax()
            for token in [*drafted[: 2 * (2 - row)], 3 + step]:
                rows.emit(row, token)
    drafter.end(rows)


def test_a_draft_ends_where_its_like_are_not_accepted() -> None:
    rows = rows_of([TEXTS[0], TEXTS[1]])
    drafter = begun(tiny("llama"), rows, min_reach=0.2)
    drafter.rates = np.zeros(drafter.traits.buckets, np.float32)
    assert set(drafter.propose(rows, 64).depth.tolist()) == {1}
    drafter.rates = np.ones(drafter.traits.buckets, np.float32)
    assert set(drafter.propose(rows, 64).depth.tolist()) == {1, 2, 3, 4}
    assert set(drafter.propose(rows, 2).depth.tolist()) == {1, 2}


def test_ids_that_only_one_of_the_two_knows_are_not_drafted_and_not_read() -> None:
    model = tiny("llama")
    rows = rows_of([[*TEXTS[0], VOCAB + 50, 7], TEXTS[1]])
    same = dict.fromkeys(("target_tokenizer", "assistant_tokenizer"), characters())
    tree = begun(model, rows, call=TargetCall(40), **same).propose(rows, 64)
    assert tree.num_nodes and tree.token_ids.max() < 40
    assert tree.token_ids[0] == logits_after(model, [*TEXTS[0], 0, 7])[:40].argmax()


def test_texts_beyond_the_assistants_positions_get_no_draft() -> None:
    model = tiny("llama")
    model.config.max_position_embeddings = 20
    rows = rows_of([TEXTS[0], TEXTS[1][:12]])
    drafter = begun(model, rows)
    tree = drafter.propose(rows, 64)
    assert np.diff(tree.row_offsets).tolist() == [0, 4]
    for token in TEXTS[1][12:18]:
        rows.emit(1, token)
    assert drafter.propose(rows, 64).num_nodes == 0


def test_a_call_without_a_prompt_gets_no_draft() -> None:
    rows = Rows(np.zeros((2, 0), np.int64))
    for row in range(2):
        rows.emit(row, 5)
    drafter = begun(tiny("llama"), rows)
    assert drafter.propose(rows, 64).num_nodes == 0
    drafter.end(rows)


def test_an_assistant_with_dropout_at_work_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be an assistant here.*uses dropout"):
        begun(tiny("gpt2").train(), rows_of([TEXTS[0]]))


def test_another_vocabulary_needs_both_tokenizers() -> None:
    model = tiny("llama")
    both = {"target_tokenizer": characters(), "assistant_tokenizer": characters(pad_token="<pad>")}
    for padded in (VOCAB - 2, VOCAB, VOCAB + 2):
        AssistantDrafter(model, call=TargetCall(padded))
    for vocab_size in (VOCAB // 2, VOCAB + 10):
        with pytest.raises(ValueError, match=f"{VOCAB} token ids, the model {vocab_size}"):
            AssistantDrafter(model, call=TargetCall(vocab_size), target_tokenizer=characters())
        AssistantDrafter(model, call=TargetCall(vocab_size), **both)


@pytest.mark.parametrize(
    ("options", "of_call", "of_assistant", "depth"),
    [
        ({}, None, None, 8),
        ({}, None, 3, 3),
        ({}, 2, 3, 2),
        ({"num_draft": 5}, 2, 3, 5),
        ({}, None, 200, 64),
    ],
)
def test_generation_settings_say_how_far_to_write(
    options: dict[str, int], of_call: int | None, of_assistant: int | None, depth: int
) -> None:
    model, rows = tiny("llama"), rows_of([TEXTS[0]])
    model.generation_config.num_assistant_tokens = of_assistant
    call = TargetCall(settings={"num_assistant_tokens": of_call})
    drafter = AssistantDrafter(model, min_reach=0.0, call=call, **options)
    drafter.begin(rows)
    assert drafter.propose(rows, 256).depth.max() == depth


def test_a_recurrent_assistant_is_left_out_by_its_own_name() -> None:
    with pytest.raises(ValueError, match="Lfm2ForCausalLM cannot be an assistant here") as raised:
        begun(build("lfm2"), rows_of(TEXTS[:1]))
    assert "To speculate" not in str(raised.value)


def test_a_wrong_generation_setting_is_named() -> None:
    with pytest.raises(ValueError, match="num_assistant_tokens is 0"):
        AssistantDrafter(tiny("llama"), call=TargetCall(settings={"num_assistant_tokens": 0}))
