"""Prompts of unlike lengths: plain's text from the tokens that are there, and when they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lookahead_hf
from tests.helpers import multimodal
from tests.helpers.caches import CACHE
from tests.helpers.compared import compared, speculated
from tests.helpers.models import tiny

PADS = (0, 20, 7, 23)
COLUMNS = 28

SETTINGS = {"max_new_tokens": 16, "do_sample": False}


def batch(on_the_left: bool = True) -> dict[str, Any]:
    """Prompts of 28, 8, 21 and 5 tokens, padded."""
    torch.manual_seed(0)
    ids, mask = torch.randint(3, 20, (len(PADS), COLUMNS)), torch.ones(len(PADS), COLUMNS).long()
    for row, pads in enumerate(PADS):
        hidden = slice(0, pads) if on_the_left else slice(COLUMNS - pads, COLUMNS)
        ids[row, hidden] = mask[row, hidden] = 0
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0, "max_new_tokens": 30}


def texts(model: Any, **kwargs: Any) -> tuple[Any, Any, lookahead_hf.SpeculativeStats]:
    """Ids of plain generation and of ours, and what ours did."""
    torch.manual_seed(1)
    plain = model.generate(**kwargs, speculative=False)
    torch.manual_seed(1)
    ours = model.generate(**kwargs, speculative={"budget": 5})
    return plain, ours, speculated(model)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "mixtral"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_only_tokens_of_live_rows_are_fed(name: str, do_sample: bool) -> None:
    model = tiny(name)
    with lookahead_hf.enabled(model):
        plain, ours, stats = texts(model, **batch(), do_sample=do_sample, eos_token_id=[7, 8, 9])
    assert torch.equal(plain, ours)
    assert len({row.row_steps for row in stats.row_stats}) > 1
    assert stats.num_fed == 4 * COLUMNS - sum(PADS) + stats.row_steps + stats.num_drafted


def test_pictures_beside_padding_are_seen() -> None:
    """The tokens of a picture do not show it: such prompts are read with all their arguments."""
    model = multimodal.build("llava")
    given = multimodal.call(model, (1, 2), (7, 9))
    assert (given["attention_mask"] == 0).any()
    compared(model, lambda: {**given, **SETTINGS}, given["input_ids"].shape[1])


def test_positions_are_those_of_the_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a model counts them from its cache, as some with pictures do."""
    model = tiny("llama")
    prepare = type(model).prepare_inputs_for_generation

    def counted(self: Any, input_ids: torch.Tensor, **given: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = prepare(self, input_ids, **given)
        held, length = given[CACHE].get_seq_length(), inputs["input_ids"].shape[1]
        return inputs | {"position_ids": torch.arange(held, held + length)[None]}

    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", counted)
    shown = {"return_dict_in_generate": True, "output_hidden_states": True}
    compared(model, lambda: {"input_ids": torch.arange(2, 8)[None], **SETTINGS, **shown}, 6)
