"""Draft tokens whose K and V are not finite: the text is plain's, and few steps run twice."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import StaticCache

import lookahead_hf
from lookahead_hf.engines.cuda import graphs
from lookahead_hf.runner import host
from tests.helpers.caches import CACHE, assert_same_cache
from tests.helpers.calls import padded
from tests.helpers.compared import speculated
from tests.helpers.device import on_device, taped
from tests.helpers.models import VOCAB, prompt, tiny
from tests.helpers.scripted import RandomTrees, Tree, chain, continuations, scripted
from tests.helpers.users_parts import Mixes

INF = float("inf")
NAN = float("nan")
CALL: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Has an entry for every step that is run again."""
    steps: list[Any] = []
    own = host.Runner.repeat_without_draft

    def counted(self: Any, rows: Any) -> Any:
        steps.append(own(self, rows))
        return steps[-1]

    monkeypatch.setattr(host.Runner, "repeat_without_draft", counted)
    return steps


def spoil(model: Any, token: int, value: float) -> None:
    """Write what is not finite, or overflows, where the model looks a token up."""
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = value
        assert model(torch.tensor([[3, token]])).logits[0, 1].isnan().all()


def unused(texts: torch.Tensor) -> int:
    """A token that nobody reads or writes."""
    return next(token for token in range(VOCAB - 1, 0, -1) if not (texts == token).any())


class Spoils:
    """In every seventh draft, a token beside the right path, before it, or at its end."""

    def __init__(self, bad: int, chains: bool = False) -> None:
        self.bad, self.chains, self.calls = bad, chains, 0
        self.trees = RandomTrees()

    def __call__(self, rest: list[int]) -> Tree:
        self.calls += 1
        tokens, parents = chain(rest[:4]) if self.chains else self.trees(rest)
        if self.calls % 7 != 3 or not rest:
            return tokens, parents
        if self.chains:
            return chain([*rest[: self.calls % 4], self.bad, 5])
        return [self.bad, *tokens, self.bad], [-1, *(p + (p >= 0) for p in parents), len(tokens)]


def inputs_of(rows: int) -> dict[str, torch.Tensor]:
    if rows > 1:
        return padded("left", rows)
    return {"input_ids": prompt(1, 14), "attention_mask": torch.ones(1, 14, dtype=torch.long)}


def check(
    model: Any,
    rows: int,
    value: float = NAN,
    chains: bool = False,
    like: dict[str, Any] | None = None,
    **call: Any,
) -> lookahead_hf.SpeculativeStats:
    """Compare a call with plain's, whose drafts hold a token that is not finite; see `Spoils`.

    In the plain call the arguments in `like` differ; "config" holds fields of the configuration.
    """
    inputs, fields = inputs_of(rows), call.pop("config", {})
    torch.manual_seed(7)
    plain = model.generate(**inputs, **{**CALL, **call, **(like or {})})
    bad = unused(plain)
    spoil(model, bad, value)
    config = scripted(continuations(plain, 14), Spoils(bad, chains))
    torch.manual_seed(7)
    with lookahead_hf.enabled(model):
        ours = model.generate(**inputs, **CALL | call, speculative=replace(config, **fields))
    assert ours.tolist() == plain.tolist()
    return speculated(model)


@pytest.mark.parametrize(("rows", "do_sample"), [(1, True), (3, False)])
@pytest.mark.parametrize("engine", ["walk", "lockstep", "device", "graphs", "rejection"])
def test_every_engine(
    engine: str, rows: int, do_sample: bool, repeats: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    call: dict[str, Any] = {"do_sample": do_sample}
    place: Any = nullcontext()
    if engine == "lockstep":
        call["logits_processor"] = [Mixes()]
    elif engine == "rejection":  # with one token to choose from, which is then plain's
        call = {"do_sample": True, "top_k": 1, "config": {"verification": "rejection"}}
        call["like"] = {"do_sample": False}
    elif engine == "device":
        place, call["config"] = on_device(monkeypatch), {"cuda_graphs": False}
    elif engine == "graphs":
        monkeypatch.setattr(graphs, "WIDTHS", (16, 1))
        place, call["config"] = taped(monkeypatch), {"cuda_graphs": True}
    with place:
        stats = check(tiny("llama"), rows, **call)
    names = {"graphs": "device", "lockstep": "lockstep" if rows > 1 else "walk"}
    assert stats.engine == names.get(engine, engine)
    assert repeats
    if engine == "graphs":
        assert stats.execution == "replayed"


def test_padding_is_no_token_that_plain_does_not_read(repeats: list[Any]) -> None:
    """A padded block, and pads that ended rows are fed, where the pad's embedding is not finite."""
    model = lookahead_hf.enable(tiny("llama"))
    ids = prompt(3, 14, seed=4)
    call: dict[str, Any] = {**CALL, "attention_mask": torch.ones_like(ids)}
    call["eos_token_id"] = int(model.generate(ids, **call)[1, 22])
    plain = model.generate(ids, **call)
    assert (plain[:, -1] == 0).any()
    spoil(model, 0, NAN)
    for fields in ({}, {"draft_invariant": True}):
        config = replace(scripted(continuations(plain, 14), RandomTrees()), **fields)
        assert model.generate(ids, **call, speculative=config).tolist() == plain.tolist()
        speculated(model)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_static_cache_comes_back_finite(name: str) -> None:
    model = lookahead_hf.enable(tiny(name))
    plain, ours = (StaticCache(config=model.config, max_cache_len=100) for _ in range(2))
    text = model.generate(**inputs_of(3), **CALL, **{CACHE: plain})
    bad = unused(text)
    spoil(model, bad, NAN)
    config = scripted(continuations(text, 14), Spoils(bad))
    got = model.generate(**inputs_of(3), **CALL, **{CACHE: ours}, speculative=config)
    assert got.tolist() == text.tolist()
    assert_same_cache(ours, plain)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_text_that_plain_itself_makes_not_finite(rows: int, repeats: list[Any]) -> None:
    """Plain reads the token: the row goes on as there, and is repeated once; others stay exact."""
    model, inputs = lookahead_hf.enable(tiny("llama")), inputs_of(rows)
    text = model.generate(**inputs, **CALL)
    first, others = text[0, 14:].tolist(), text[1:]
    own = next(t for t in first[5:] if not (others == t).any() and t not in text[0, :19])
    spoil(model, own, NAN)
    plain = model.generate(**inputs, **CALL)
    assert plain.tolist() != text.tolist() and plain[1:].tolist() == others.tolist()
    for bad in (None, unused(plain)):
        repeats.clear()
        if bad is not None:
            spoil(model, bad, NAN)
        script = RandomTrees() if bad is None else Spoils(bad)
        config = scripted(continuations(plain, 14), script)
        assert model.generate(**inputs, **CALL, speculative=config).tolist() == plain.tolist()
        speculated(model)
        if bad is None:
            assert len(repeats) <= 3
