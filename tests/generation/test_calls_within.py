"""Calls within calls: what a processor or criterion generates leaves the outer call as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import lookahead_hf
from tests.helpers.calls import padded
from tests.helpers.compared import speculated
from tests.helpers.models import prompt, tiny
from tests.helpers.random_calls import smallest
from tests.helpers.scripted import RandomTrees, continuations, right, scripted

INNER: dict[str, Any] = {"max_new_tokens": 8, "pad_token_id": 0}


class Asks:
    """Generates at every third token; what came of it decides what is likely, or what stops."""

    def __init__(self, inner: Callable[[], torch.Tensor]) -> None:
        self.inner, self.calls = inner, 0

    def asked(self) -> int:
        self.calls += 1
        return self.calls if self.calls % 3 else int(self.inner().sum())


class AskingProcessor(Asks, transformers.LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 2.0 * ((torch.arange(scores.shape[1]) + self.asked()) % 5 == 0)

    def given(self) -> dict[str, Any]:
        return {"logits_processor": transformers.LogitsProcessorList([self])}


class AskingCriterion(Asks, transformers.StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return (input_ids[:, -1] + self.asked()) % 59 == 0

    def given(self) -> dict[str, Any]:
        return {"stopping_criteria": transformers.StoppingCriteriaList([self])}


def ran(model: Any, call: dict[str, Any], **ours: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The text, and where the default generator then stands."""
    torch.manual_seed(3)
    return model.generate(**call, **ours), torch.get_rng_state()


@pytest.mark.parametrize(("kind", "do_sample"), [(AskingProcessor, True), (AskingCriterion, False)])
@pytest.mark.parametrize(
    ("name", "inner_name", "rows"),
    [("gemma3", "gemma3", 3), ("gemma3", "llama", 1), ("bart", "bart", 3)],
)
def test_a_call_in_which_others_are_made(
    name: str, inner_name: str, rows: int, do_sample: bool, kind: Any
) -> None:
    model = tiny(name).double() if name == "bart" else smallest(name)
    other = model if inner_name == name else smallest(inner_name)
    inner_call = {"input_ids": prompt(2, seed=5), **INNER, "do_sample": do_sample, "top_k": 0}
    call = {"input_ids": prompt(rows), "do_sample": do_sample, "top_k": 0, "pad_token_id": 0}
    call |= {"max_new_tokens": 20, **(padded("right", rows) if name == "bart" else {})}
    columns, inner_columns = (1, 1) if name == "bart" else (12, 12)
    plain_asks = kind(lambda: other.generate(**inner_call))
    plain, state = ran(model, {**call, **plain_asks.given()})
    truths = continuations(other.generate(**inner_call), inner_columns)
    accepted: list[int] = []

    def asked() -> torch.Tensor:
        config = scripted(truths, right(4))
        output = lookahead_hf.generate(other, **inner_call, speculative=config)
        accepted.append(lookahead_hf.last_stats(other).num_accepted)
        return output

    asks = kind(asked)
    attention = model.config._attn_implementation
    with lookahead_hf.enabled(model), lookahead_hf.enabled(other):
        config = scripted(continuations(plain, columns), RandomTrees(1))
        got, got_state = ran(model, {**call, **asks.given()}, speculative=config)
    assert speculated(model).rows == rows
    assert got.tolist() == plain.tolist()
    assert torch.equal(got_state, state)
    assert asks.calls == plain_asks.calls
    assert len(accepted) > 1 and (do_sample or min(accepted) > 0)
    assert model.config._attn_implementation == attention
    assert type(model.config._attn_implementation) is str  # not ours


@pytest.mark.parametrize("outer", [True, False, "fallback"])
def test_a_call_within_decides_for_itself(outer: Any) -> None:
    """Asked for by name it is speculated; where nothing was said, as the model's default has it."""
    model, other = tiny("llama"), tiny("gpt2")
    plain = other.generate(prompt(), do_sample=False, **INNER)
    found: list[Any] = []

    def generated(generate: Callable[..., Any], **ours: Any) -> torch.Tensor:
        output = generate(prompt(), do_sample=False, **INNER, **ours)
        assert torch.equal(output, plain)
        found.append(lookahead_hf.last_stats(other))
        return output

    def inner() -> torch.Tensor:
        generated(lambda *args, **kwargs: lookahead_hf.generate(other, *args, **kwargs))
        generated(other.generate, prediction=plain[0, 12:])
        return generated(other.generate)

    asks = AskingProcessor(inner)
    call = {**INNER, "do_sample": False, **asks.given()}
    if outer == "fallback":
        call |= {"num_beams": 2}
    with lookahead_hf.enabled(model), lookahead_hf.enabled(other):
        lookahead_hf.set_default(other, {"budget": 8})  # whatever it costs
        config = lookahead_hf.SpeculativeConfig(on_fallback="silent")
        model.generate(prompt(), **call, speculative=config if outer else False)
    assert len(found) >= 6
    by_name, predicted, default = found[:3]
    assert by_name.num_steps > 0 and by_name.fallback_reason is None
    assert predicted.num_accepted > 0
    assert default.num_steps > 0


def test_an_assistant_with_a_default_drafts_as_transformers_has_it() -> None:
    """For a model that is not ours: a handful of tokens, which go on with a cache of its own."""
    model, assistant = tiny("llama"), tiny("llama", seed=1)
    call = {"input_ids": prompt(), "do_sample": False, **INNER, "assistant_model": assistant}
    plain = model.generate(**call)
    lookahead_hf.set_default(assistant, True)
    with lookahead_hf.enabled(assistant):
        assert torch.equal(model.generate(**call), plain)
        assert lookahead_hf.last_stats(assistant) is None
        assert torch.equal(model.generate(**call, return_dict_in_generate=True).sequences, plain)
