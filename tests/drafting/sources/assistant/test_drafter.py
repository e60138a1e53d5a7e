"""An assistant writes ahead in ragged batches, and its cache follows what the target decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lookahead_hf.compat import attention_name
from lookahead_hf.draft import ROOT, DraftTree
from lookahead_hf.drafting.sources.assistant.drafter import AssistantDrafter
from lookahead_hf.drafting.sources.assistant.model import AssistantModel
from lookahead_hf.fallback import Unserved
from lookahead_hf.rows import Rows
from tests.helpers.drafts import paths, rows_of
from tests.helpers.models import VOCAB, characters, prompt, tiny

TEXTS = [prompt(length=30, seed=row)[0].tolist() for row in range(3)]
LENGTHS = [5, 9, 2]


def logits_after(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """The model's own logits, [vocab]."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(tokens)])).logits[0, -1]


def reading(model: Any) -> AssistantModel:
    return AssistantModel(model, [np.array(t[:n]) for t, n in zip(TEXTS, LENGTHS, strict=True)])


def begun(model: Any, rows: Rows, **options: Any) -> AssistantDrafter:
    drafter = AssistantDrafter(model, **{"min_reach": 0.0, "num_draft": 4, **options})
    drafter.begin(rows)
    return drafter


def check_tree(model: Any, rows: Rows, tree: DraftTree, top_k: int, beam: int, depth: int) -> None:
    """Every node that has children has the model's likeliest tokens; so many at each depth."""
    for row in np.flatnonzero(rows.live).tolist():
        parents = tree.parents[tree.row(row)]
        depths = tree.depth[tree.row(row)]
        gone_on = sorted(set(parents.tolist()))
        for node in gone_on:
            path = [] if node == ROOT else paths(tree, row)[node]
            best = logits_after(model, [*rows.context(row).tolist(), *path]).topk(top_k).indices
            children = tree.token_ids[tree.row(row)][parents == node]
            assert sorted(children.tolist()) == sorted(best.tolist())
        assert ROOT in gone_on
        of_depth = [int(sum(depths[n] == d for n in gone_on if n != ROOT)) for d in range(1, depth)]
        assert of_depth == [min(beam, top_k), *[beam] * (depth - 2)]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
def test_the_cache_is_the_texts_own_after_keeping_and_forgetting(name: str) -> None:
    model = tiny(name)
    ours = reading(model)
    chains = [TEXTS[0][5:8] + [7, 8], [], TEXTS[2][2:4] + [9]]
    ours.feed(chains)
    ours.keep(np.array([5, 0, 3]))
    ours.forget(0, 2)
    ours.forget(2, 1)
    assert [ours.read(row).tolist() for row in range(3)] == [
        TEXTS[0][:8],
        TEXTS[1][:9],
        TEXTS[2][:4],
    ]
    logits = ours.feed([TEXTS[0][8:9], TEXTS[1][9:12], []])
    for row, place, length in ((0, 0, 9), (1, 0, 10), (1, 2, 12)):
        expected = logits_after(model, TEXTS[row][:length])
        torch.testing.assert_close(logits[row, place], expected, atol=2e-3, rtol=1e-4)


def test_branches_hang_on_the_end_of_a_chain() -> None:
    model = tiny("llama")
    ours = reading(model)
    chains = [TEXTS[0][5:7], TEXTS[1][9:10], TEXTS[2][2:5]]
    branches = [([11, 12, 13], [-1, -1, 1]), ([14], [-1]), ([], [])]
    logits = ours.feed(chains, branches)
    for row, place, after in (
        (0, 1, TEXTS[0][:7]),
        (0, 2, [*TEXTS[0][:7], 11]),
        (0, 4, [*TEXTS[0][:7], 12, 13]),
        (1, 1, [*TEXTS[1][:10], 14]),
        (2, 2, TEXTS[2][:5]),
    ):
        expected = logits_after(model, after)
        torch.testing.assert_close(logits[row, place], expected, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("beam", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_drafts_are_what_the_model_would_write_in_every_step(name: str, beam: int) -> None:
    model = tiny(name)
    rows = rows_of([text[:length] for text, length in zip(TEXTS, LENGTHS, strict=True)])
    drafter = begun(model, rows, beam=beam)
    for step in range(4):
        tree = drafter.propose(rows, 64)
        check_tree(model, rows, tree, top_k=3, beam=beam, depth=4)
        for row in range(3):  # row 0 accepts it all, row 1 a part, row 2 nothing
            drafted = paths(tree, row)[-1][:-1]
            for token in [*drafted[: 2 * (2 - row)], 3 + step]:
                rows.emit(row, token)
    drafter.end(rows)


def test_finished_rows_and_steps_without_a_proposal_cost_nothing() -> None:
    model = tiny("llama")
    rows = rows_of([text[:length] for text, length in zip(TEXTS, LENGTHS, strict=True)])
    drafter = begun(model, rows)
    drafter.propose(rows, 64)
    rows.end(1)
    for token in TEXTS[0][20:28]:
        rows.emit(0, token)
        rows.emit(2, token)
    tree = drafter.propose(rows, 64)
    assert len(tree.token_ids[tree.row(1)]) == 0
    check_tree(model, rows, tree, top_k=3, beam=1, depth=4)


def test_a_draft_ends_where_its_like_are_not_accepted() -> None:
    rows = rows_of([TEXTS[0], TEXTS[1]])
    drafter = begun(tiny("llama"), rows, min_reach=0.2)
    drafter.rates = np.zeros(drafter.num_buckets, np.float32)
    assert set(drafter.propose(rows, 64).depth.tolist()) == {1}
    drafter.rates = np.ones(drafter.num_buckets, np.float32)
    assert set(drafter.propose(rows, 64).depth.tolist()) == {1, 2, 3, 4}
    assert set(drafter.propose(rows, 2).depth.tolist()) == {1, 2}


def test_the_likeliest_token_is_gone_on_from_whatever_was_learned() -> None:
    model = tiny("llama")
    rows = rows_of([TEXTS[0]])
    drafter = begun(model, rows, num_draft=2)
    drafter.rates = np.linspace(1, 0.5, drafter.num_buckets, dtype=np.float32)
    tree = drafter.propose(rows, 64)
    best = logits_after(model, TEXTS[0]).argmax()
    (gone_on,) = set(tree.parents.tolist()) - {ROOT}
    assert int(tree.token_ids[gone_on]) == int(best)


def test_evidence_tells_depth_and_likeliness_apart() -> None:
    rows = rows_of([TEXTS[0]])
    drafter = begun(tiny("llama"), rows)
    drafter.rates = np.linspace(0, 1, drafter.num_buckets, dtype=np.float32)
    tree = drafter.propose(rows, 64)
    assert tree.evidence is not None
    buckets, reach = tree.evidence.bucket.tolist(), 1.0
    assert len(drafter.prior()) == drafter.num_buckets > max(buckets)
    first = [bucket for bucket, depth in zip(buckets, tree.depth, strict=True) if depth == 1]
    assert not set(first) & {b for b, depth in zip(buckets, tree.depth, strict=True) if depth > 1}
    probs = logits_after(tiny("llama"), TEXTS[0]).softmax(-1).topk(3).values
    assert first == [min(int(p * 10), 9) for p in probs.tolist()]
    for node in [0, tree.parents.tolist().index(0)]:
        reach *= float(drafter.rates[buckets[node]])
        assert tree.score[node] == pytest.approx(reach)


def test_no_random_number_is_drawn() -> None:
    rows = rows_of([TEXTS[0], TEXTS[1]])
    before = torch.get_rng_state()
    drafter = begun(tiny("llama"), rows)
    after_model = torch.get_rng_state()
    assert drafter.propose(rows, 64).num_nodes
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(after_model, before)


def test_ids_that_only_one_of_the_two_knows_are_not_drafted_and_not_read() -> None:
    model = tiny("llama")
    rows = rows_of([[*TEXTS[0], VOCAB + 50, 7], TEXTS[1]])
    same = dict.fromkeys(("target_tokenizer", "assistant_tokenizer"), characters())
    tree = begun(model, rows, vocab_size=40, top_k=5, **same).propose(rows, 64)
    assert tree.num_nodes and tree.token_ids.max() < 40
    best = logits_after(model, [*TEXTS[0], 0, 7])[:40].topk(5).indices
    assert sorted(tree.token_ids[:5].tolist()) == sorted(best.tolist())


def test_texts_beyond_the_assistants_positions_get_no_draft() -> None:
    model = tiny("llama")
    model.config.max_position_embeddings = 20
    rows = rows_of([TEXTS[0], TEXTS[1][:12]])
    drafter = begun(model, rows)
    tree = drafter.propose(rows, 64)
    assert np.diff(tree.row_offsets).tolist() == [0, 12]
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
    with pytest.raises(Unserved, match="drop"):
        begun(tiny("gpt2").train(), rows_of([TEXTS[0]]))


def test_the_assistant_is_left_as_it_was() -> None:
    model = tiny("llama")
    rows = rows_of([TEXTS[0]])
    drafter = begun(model, rows)
    assert attention_name(model.config) == "lookahead:sdpa"
    drafter.end(rows)
    assert attention_name(model.config) == "sdpa"


@pytest.mark.parametrize("vocab_size", [VOCAB - 2, VOCAB, VOCAB + 2])
def test_a_vocabulary_that_is_padded_otherwise_is_the_same(vocab_size: int) -> None:
    AssistantDrafter(tiny("llama"), vocab_size=vocab_size)


@pytest.mark.parametrize("vocab_size", [VOCAB // 2, VOCAB + 10])
def test_another_vocabulary_needs_both_tokenizers(vocab_size: int) -> None:
    model, own = tiny("llama"), characters()
    says = f"assistant has {VOCAB} token ids, the model {vocab_size}.*tokenizer=.*assistant_token"
    for tokenizer in (None, own):  # that of the model is there for other things, too
        with pytest.raises(ValueError, match=says):
            AssistantDrafter(model, vocab_size=vocab_size, target_tokenizer=tokenizer)
    both = {"target_tokenizer": own, "assistant_tokenizer": characters(pad_token="<pad>")}
    AssistantDrafter(model, vocab_size=vocab_size, **both)
    with pytest.raises(ValueError, match="assistant_tokenizer= needs tokenizer="):
        AssistantDrafter(model, vocab_size=VOCAB, assistant_tokenizer=own)


@pytest.mark.parametrize("option", [{"top_k": 2}, {"beam": 2}])
def test_trees_in_another_vocabulary_are_refused(option: dict[str, int]) -> None:
    both = {
        "target_tokenizer": characters(),
        "assistant_tokenizer": characters(pad_token="<pad>"),
    }
    AssistantDrafter(tiny("llama"), **both)
    with pytest.raises(ValueError, match="another vocabulary drafts chains"):
        AssistantDrafter(tiny("llama"), **both, **option)


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
    settings = {"num_assistant_tokens": of_call}
    drafter = AssistantDrafter(model, min_reach=0.0, settings=settings, **options)
    drafter.begin(rows)
    assert drafter.propose(rows, 256).depth.max() == depth


def test_generation_settings_that_are_not_served_are_named() -> None:
    model = tiny("llama")
    with pytest.warns(UserWarning, match="assistant_confidence_threshold=0.7 is not used.*min_rea"):
        AssistantDrafter(model, settings={"assistant_confidence_threshold": 0.7})
    model.generation_config.num_assistant_tokens_schedule = "heuristic"
    with pytest.warns(UserWarning, match="num_assistant_tokens_schedule='heuristic' is not used"):
        AssistantDrafter(model)
    with pytest.raises(ValueError, match="num_assistant_tokens is 0"):
        model.generation_config.num_assistant_tokens_schedule = "constant"
        AssistantDrafter(model, settings={"num_assistant_tokens": 0})
