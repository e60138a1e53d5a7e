"""What a call is given beside token ids: the text is plain's, whatever form the inputs have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lookahead_hf
from tests.helpers.architectures import build
from tests.helpers.calls import padded
from tests.helpers.compared import compared, left_to_plain
from tests.helpers.models import prompt, tiny
from tests.helpers.scripted import RandomChains
from tests.helpers.users_parts import Changing

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}


def test_embeddings_beside_ids() -> None:
    """The ids are returned, the embeddings are read."""
    model, ids = tiny("llama"), prompt()
    embeds = model.get_input_embeddings()(prompt(seed=8)).detach()
    call = {"input_ids": ids, "inputs_embeds": embeds, **GREEDY}
    compared(model, lambda: dict(call), 12)


@pytest.mark.parametrize("name", ["mamba2", "opt"])
def test_embeddings_without_ids(name: str) -> None:
    """Columns are those of the embeddings, also where the model has no positions."""
    model, mask = build(name), torch.ones(2, 12, dtype=torch.long)
    mask[0, :2] = 0
    embeds = model.get_input_embeddings()(prompt(2)).detach()
    call = {"inputs_embeds": embeds, "attention_mask": mask, **GREEDY}
    compared(model, lambda: dict(call), 0, RandomChains())


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("gpt2", {"token_type_ids": torch.zeros(3, 12, dtype=torch.long)}),
        ("gpt2", {"token_type_ids": torch.tensor([[3], [4], [5]]).repeat(1, 12)}),
        ("gpt2", {"token_type_ids": torch.tensor([[0] * 11 + [last] for last in (9, 30, 50)])}),
        *(
            (name, {"labels": labels})  # which plain passes to no forward
            for name in ("llama", "t5")
            for labels in (torch.full((3, 7), -100), [[3, 4], [5, 6], [7, 8]])
        ),
        *(("llama", {"logits_to_keep": kept}) for kept in (0, 1, 5)),
    ],
)
def test_arguments_beside_ids(name: str, given: dict[str, Any]) -> None:
    call = {"input_ids": prompt(3), **GREEDY, **given}
    compared(tiny(name), lambda: dict(call), 1 if name == "t5" else 12)


def test_what_plain_does_pass_on_is_left_to_it() -> None:
    class Biased(Changing):
        def change(self, logits: torch.Tensor, steps: int) -> None:
            logits[..., 7] += steps

    model = tiny("llama")
    model.__class__ = Biased
    call = {"input_ids": prompt(), "steps": torch.tensor(100), **GREEDY}
    left_to_plain(model, lambda: dict(call), r"'steps'.*\[argument\]")
    assert model.generate(**call)[0, 12:].tolist() == [7] * 24


@pytest.mark.parametrize(("rows", "do_sample"), [(1, True), (3, False)])
def test_guidance_by_a_negative_prompt(rows: int, do_sample: bool) -> None:
    """Its second, unconditional run sees every token once and in order."""
    inputs, negative = padded("left", rows), prompt(rows, 6, seed=5)
    guided: dict[str, Any] = {"guidance_scale": 1.5, "negative_prompt_ids": negative}
    if do_sample:
        guided |= {"do_sample": True, "top_k": 0, "eos_token_id": [3, 4, 5]}
    call = {**inputs, **GREEDY, **guided}
    stats = compared(tiny("llama"), lambda: dict(call), 14).stats
    assert stats.engine == ("walk" if rows == 1 else "lockstep")


def test_a_mask_of_four_dimensions_is_left_to_plain() -> None:
    model, ids = tiny("llama"), prompt()
    embeds = model.get_input_embeddings()(ids).detach()
    mask = torch.zeros(1, 1, 12, 12)
    positions = torch.arange(12)[None]
    call = {"inputs_embeds": embeds, "attention_mask": mask, "position_ids": positions, **GREEDY}
    with pytest.raises(RuntimeError) as plain:
        model.generate(**call)
    with (
        lookahead_hf.enabled(model),
        pytest.warns(lookahead_hf.SpeculationFallbackWarning, match=r"4 dimensions.*\[argument\]"),
        pytest.raises(RuntimeError) as ours,
    ):
        model.generate(**call, speculative=True)
    assert str(ours.value) == str(plain.value)
    with lookahead_hf.enabled(model), pytest.raises(ValueError, match="must be 2D"):
        model.generate(ids, attention_mask=mask, **GREEDY, speculative=True)


@pytest.mark.parametrize("shape", [(1, 0), (3, 0), (0, 5)])
def test_a_prompt_without_tokens_fails_as_in_plain(shape: tuple[int, int]) -> None:
    model, ids = lookahead_hf.enable(tiny("llama")), torch.zeros(shape, dtype=torch.long)
    errors = []
    for speculative in (False, True):
        with pytest.raises((RuntimeError, IndexError)) as raised:
            model.generate(ids, **GREEDY, speculative=speculative)
        errors.append((raised.type, str(raised.value)))
    assert errors[0] == errors[1]
