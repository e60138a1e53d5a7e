"""Whatever a drafter of the user's does, the call goes on and its text is plain's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.call.prepared import Request
from lookahead_hf.draft import DraftTree, Evidence
from lookahead_hf.drafting.drafter import Drafter, Step, Traits
from lookahead_hf.drafting.registry import build
from lookahead_hf.drafting.sources.user import UserDrafter
from lookahead_hf.rows import Rows
from tests.helpers.calls import padded
from tests.helpers.compared import compared, served, speculated
from tests.helpers.models import VOCAB, prompt, tiny

Propose = Callable[[Rows, int], Any]


class Own(Drafter):
    """Proposes what it was told to."""

    name = "own"

    def __init__(self, propose: Propose) -> None:
        self._propose = propose

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        return self._propose(rows, max_nodes)


def tree(
    tokens: Any = (5, 6),
    parents: Any = (-1, 0),
    offsets: Any = None,
    evidence: Any = None,
    probs: Any = None,
) -> DraftTree:
    """A tree of one row from anything; the arrays that nobody reads are of no use."""
    tokens, parents = np.asarray(tokens), np.asarray(parents)
    offsets = [0, len(tokens)] if offsets is None else offsets
    unread: Any = np.array([np.nan])
    return DraftTree(np.asarray(offsets), tokens, parents, unread, unread, evidence, probs)


def evidence(*buckets: int) -> Evidence:
    each = np.arange(len(buckets) + 1)
    return Evidence(each, np.full(len(buckets), 99), np.array(buckets))


WRONG = {
    "none": None,
    "no tree": [[1, 2]],
    "two rows": DraftTree.from_chains([[[1]], [[2]]]),
    "a cycle": tree([5, 6, 7], [1, 2, 0]),
    "its own parent": tree([5], [0]),
    "a parent far below": tree(parents=[-5, 0]),
    "a parent in another row": tree([5, 6], [-1, 1]),
    "float ids": tree([5.0, 6.0]),
    "bool ids": tree([True, False]),
    "text": tree(["a", "b"]),
    "fewer parents": tree(parents=[-1]),
    "offsets that end early": tree(offsets=[0, 1]),
    "offsets that fall": tree(offsets=[0, 3, 2]),
    "no offsets": tree(offsets=[]),
    "evidence of one node": tree(evidence=evidence(0)),
    "buckets below 0": tree(evidence=evidence(0, -7)),
    "buckets too high": tree(evidence=evidence(0, 1)),
    "probs of numpy": tree(probs=np.ones((2, VOCAB))),
    "probs of integers": tree(probs=torch.ones(2, VOCAB, dtype=torch.long)),
    "probs of one node": tree(probs=torch.ones(1, VOCAB)),
    "probs of few tokens": tree(probs=torch.ones(2, 6)),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return lookahead_hf.enable(tiny("llama"))


def text(model: Any, drafter: Any = None, verification: str = "exact", **call: Any) -> Any:
    """A text of `model`, seed 1, plain where no drafter is given."""
    if drafter is not None:
        call["speculative"] = SpeculativeConfig(
            drafters=(drafter,), budget=16, verification=verification
        )
    torch.manual_seed(1)
    return model.generate(prompt(), max_new_tokens=12, **call).tolist()


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_tree_costs_the_drafter_alone(model: Any, value: Any) -> None:
    own, plain = Own(lambda rows, max_nodes: value), text(model, do_sample=False)
    with pytest.warns(RuntimeWarning, match="'own' failed and is left out") as caught:
        assert text(model, own, do_sample=False) == plain
    assert len(caught) == 1
    assert served(model).num_drafted == 0


def probs_of(*rows: dict[int, float], vocab: int = VOCAB) -> torch.Tensor:
    probs = torch.zeros(len(rows), vocab)
    for row, chances in zip(probs, rows, strict=True):
        row[list(chances)] = torch.tensor(list(chances.values()))
    return probs


IMPROPER = {
    "not a number": ({}, torch.full((2, VOCAB), torch.nan), "sum up to 1, not nan"),
    "infinite": ({}, torch.full((2, VOCAB), torch.inf), "sum up to 1, not inf"),
    "too much": ({}, probs_of({5: 1.0}, {6: 0.6, 7: 0.6}), "probs.1. is not a dist.*not 1.2"),
    "negative": ({}, probs_of({5: 1.0}, {6: 1.5, 7: -0.5}), "must not be negative"),
    "beyond the vocabulary": ({}, probs_of({5: 0.5, 120: 0.5}, {6: 1.0}, vocab=130), "not 0.5"),
    "not drawn": ({}, probs_of({5: 1.0}, {7: 1.0}), "node 1 holds the token 6"),
    "no token": ({"tokens": [5, -3]}, probs_of({5: 1.0}, {7: 1.0}), "holds the token -3"),
}


@pytest.mark.parametrize(("fields", "probs", "says"), IMPROPER.values(), ids=IMPROPER)
def test_probabilities_that_cannot_be_cost_the_drafter_alone(
    model: Any, fields: Any, probs: torch.Tensor, says: str
) -> None:
    own = Own(lambda rows, n: tree(**fields, probs=probs))
    plain = text(model, do_sample=True)
    with pytest.warns(RuntimeWarning, match=f"'own' failed.*{says}"):
        got = text(model, own, "rejection", do_sample=True)
    assert got == plain  # one row without drafts draws as plain does
    text(model, own, do_sample=True)  # where nothing is decided by them, they are not looked at


def test_probabilities_in_half_precision_are_distributions(model: Any) -> None:
    chances = (torch.randn(2, 130, generator=torch.Generator().manual_seed(1))).softmax(-1)
    chances[:, VOCAB:] = 0
    probs = (chances / chances.sum(-1, keepdim=True)).bfloat16()
    adapted = UserDrafter(Own(lambda rows, n: tree(probs=probs)), VOCAB)
    proposed = adapted.propose(Rows(np.zeros((1, 3), np.int64)), 8)
    assert proposed.probs.shape == (2, VOCAB)  # type: ignore[attr-defined]
    torch.testing.assert_close(proposed.probs.sum(-1), torch.ones(2))  # type: ignore[attr-defined]


class Vandal(Own):
    """Writes into all that it is shown, in every way."""

    def begin(self, rows: Rows) -> None:
        self.spoil(rows)

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        self.spoil(rows)
        return super().propose(rows, max_nodes)

    def observe(self, step: Step) -> None:
        self.spoil(step.rows)
        for name in ("token_ids", "path", "path_offsets"):
            getattr(step.verdict, name)[...] = 10**6
        step.draft.parents[...] = 10**6
        if step.draft.evidence is not None:
            step.draft.evidence.bucket[...] = 10**6
        step.logits.zero_()

    def end(self, rows: Rows) -> None:
        self.spoil(rows)

    def spoil(self, rows: Rows) -> None:
        for row in range(rows.num_rows):
            rows.context(row).sort()
            torch.from_numpy(rows.emitted(row)).fill_(5)
            rows.ids(row)[:] = 5
            rows.emit(row, 5)
            rows.end(row)
        rows.num_emitted[:] = 0
        if rows.encoder_ids is not None:
            rows.encoder_ids[0][:] = 5


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_shown_to_a_drafter_may_be_written_into(rows: int, do_sample: bool) -> None:
    call = {**padded("left", rows), "do_sample": do_sample, "pad_token_id": 0, "max_new_tokens": 30}
    vandal = Vandal(lambda rows, n: DraftTree.from_chains([[[5, 6, 7]]] * rows.num_rows))
    fields = {"drafters": (vandal, "ngram", "recycling"), "budget": 16}
    stats = compared(tiny("llama"), lambda: dict(call), 14, **fields).stats
    assert stats.per_source["ngram"].accepted + stats.per_source["recycling"].accepted > 0
    assert stats.per_source["own"].drafted > 0


def as_lists(token: int) -> DraftTree:
    return DraftTree([0, 1], [token], [-1], [1], [1.0], Evidence([0, 1], [0], [0]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "made",
    [
        lambda token: tree([-5, VOCAB, 10**12, token], [-1, -1, -1, -1]),
        as_lists,
        lambda token: tree(np.array([token], np.uint8), torch.tensor([-1])),
    ],
    ids=["beside tokens that the target does not have", "lists", "other integers"],
)
def test_what_can_be_used_is_used(model: Any, made: Callable[[int], DraftTree]) -> None:
    plain = text(model, do_sample=False)
    right = plain[0][12:]
    own = Own(lambda rows, max_nodes: made(right[int(rows.num_emitted[0])]))
    assert text(model, own, do_sample=False) == plain
    stats = speculated(model)
    assert stats.num_accepted == stats.num_drafted


def failing(attribute: str) -> Any:
    """A drafter of which one attribute raises."""

    def fail(self: Any, *_: Any) -> Any:
        raise ZeroDivisionError("no such luck")

    is_property = attribute in ("name", "traits")
    body = {attribute: property(fail) if is_property else fail}
    return type("Failing", (Own,), body)(lambda rows, n: DraftTree.empty(rows.num_rows))


@pytest.mark.parametrize("attribute", ["traits", "begin", "propose", "observe", "end"])
def test_a_drafter_that_raises_is_left_out(model: Any, attribute: str) -> None:
    plain = text(model, do_sample=False)
    with pytest.warns(RuntimeWarning, match="'own' failed.*ZeroDivisionError: no such luck"):
        assert text(model, failing(attribute), do_sample=False) == plain


@pytest.mark.parametrize(
    ("buckets", "prior"),
    [(0, []), (-1, [0.3]), (1.5, [0.3]), (True, [0.3]), (None, [0.3]), (2, [0.3]), (1, None)]
    + [(1, [[0.3]]), (1, ["a"]), (1, [float("nan")]), (1, [-0.1]), (1, [1.1])],
)
def test_traits_are_checked(buckets: Any, prior: Any) -> None:
    with pytest.raises(ValueError, match="buckets is|prior must be"):
        Traits(buckets, prior)


def test_traits_name_what_is_needed() -> None:
    with pytest.raises(ValueError, match="hiden_states.*hidden_states"):
        Traits(needs={"hiden_states": True})
    odd = Own(lambda rows, n: DraftTree.empty(rows.num_rows))
    odd.traits = {"buckets": 2}  # type: ignore[assignment]
    with pytest.warns(RuntimeWarning, match="'own' failed.*traits must be"):
        assert len(build(Request(SpeculativeConfig((odd, "ngram"))))) == 1


def test_an_object_of_the_callers_serves_one_call_at_a_time() -> None:
    model = lookahead_hf.enable(tiny("llama"))
    drafted: list[Rows] = []

    class Calling(Drafter):
        def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
            drafted.append(rows)
            if len(drafted) == 1:
                with pytest.warns(RuntimeWarning, match="'custom' drafts for another call"):
                    model.generate(prompt(), **call)
                assert len(drafted) == 1
            return DraftTree.from_chains([[[5]]])

    call: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    call["speculative"] = SpeculativeConfig(Calling(), budget=2)
    model.generate(prompt(), **call)
    assert len(drafted) > 2
