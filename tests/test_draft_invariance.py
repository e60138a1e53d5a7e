"""`draft_invariant`: the text does not depend on drafter or budget, bit for bit, in bf16 too."""

from __future__ import annotations

from typing import Any

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.drafting.session import INVARIANT_WIDTH
from tests.helpers.compared import reason_of, speculated
from tests.helpers.models import prompt, tiny
from tests.helpers.scripted import RandomTrees, continuations, scripted


def shapes_of(model: Any, config: SpeculativeConfig) -> set[tuple[int, ...]]:
    """Shapes of ids and mask that the model was fed behind the prompt."""
    seen: list[tuple[int, ...]] = []

    def note(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        seen.append((*kwargs["input_ids"].shape, *(() if mask is None else mask.shape)))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    ids = prompt(2)
    with lookahead_hf.enabled(model):
        model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0, speculative=config)
    handle.remove()
    return set(seen[1:])


def test_every_block_has_one_shape_and_drafts_are_chains() -> None:
    model = tiny("llama")
    plain = model.generate(prompt(2), max_new_tokens=24, do_sample=False, pad_token_id=0)
    trees = scripted(continuations(plain, 12), RandomTrees())
    expected = {(2, INVARIANT_WIDTH, 2, 1, INVARIANT_WIDTH, 12 + 24 + INVARIANT_WIDTH)}
    for fields in ({"budget": 0}, {"drafters": trees.drafters, "budget": 64}):
        assert shapes_of(model, SpeculativeConfig(draft_invariant=True, **fields)) == expected
    assert speculated(model).num_moved == 0
    assert len(shapes_of(model, trees)) > 1


def test_a_mixture_of_experts_falls_back() -> None:
    model = tiny("mixtral")
    config = SpeculativeConfig(draft_invariant=True, on_fallback="silent")
    with lookahead_hf.enabled(model):
        model.generate(prompt(), max_new_tokens=4, pad_token_id=0, speculative=config)
    assert reason_of(model) == "invariance"
