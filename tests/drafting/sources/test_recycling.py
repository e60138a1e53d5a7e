"""Drafts from the target's own logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_hf.draft import ROOT, DraftTree, Verdict
from lookahead_hf.drafting.drafter import BestTokens, Step
from lookahead_hf.drafting.sources import _recycling_numba as compiled
from lookahead_hf.drafting.sources._recycling_numba import NEXT_START, NUM_BUCKETS
from lookahead_hf.drafting.sources.recycling import MANY_ROWS, RecyclingDrafter
from lookahead_hf.ngram_pool.logits_memory import LogitsMemory, find
from lookahead_hf.rows import Rows
from tests.helpers.drafts import assert_ordered, emit, paths, rows_of

# `find` is called from compiled functions only, with other types than the ones here.
pytestmark = pytest.mark.usefixtures("compiles")

VOCAB = 40
LIKELY, POSSIBLE = 8.0, 4.0


def drafter_for(rows: Rows, **options: object) -> RecyclingDrafter:
    drafter = RecyclingDrafter(**options)  # type: ignore[arg-type]
    drafter.begin(rows)
    return drafter


def logits_of(*rows: list[dict[int, float]]) -> torch.Tensor:
    """Logits [rows, width, VOCAB] that are 0 but for the tokens given per place."""
    logits = torch.zeros(len(rows), max(map(len, rows)), VOCAB)
    for row, places in enumerate(rows):
        for place, tokens in enumerate(places):
            for token, value in tokens.items():
                logits[row, place, token] = value
    return logits


def take(rows: Rows, *outcomes: tuple[list[int], list[int]]) -> Verdict:
    """Emit what each row's (path, tokens) says and return it as the verdict."""
    accepted, emitted = zip(*outcomes, strict=True)
    emit(rows, emitted)
    return Verdict.from_rows(emitted, accepted, finished=rows.finished.copy())


@pytest.mark.parametrize("num_rows", [1, MANY_ROWS])
def test_rejected_nodes_are_learned_from_too(num_rows: int) -> None:
    rows = rows_of([[1, 2]] * num_rows)
    drafter = drafter_for(rows)
    draft = DraftTree.from_rows([([10, 11, 14], [ROOT, ROOT, 1])] * num_rows)
    verdict = take(rows, *[([0], [10, 12])] * num_rows)
    logits = logits_of(*[[{10: LIKELY}, {12: LIKELY}, {13: LIKELY}, {15: LIKELY}]] * num_rows)
    drafter.observe(Step(rows, draft, verdict, logits))
    memory = drafter._memory
    assert memory is not None
    for context, best in (((2, 11), 13), ((2, 10), 12), ((1, 2), 10)):
        assert memory.tokens[find(memory.keys, *context), 0] == best
    # Where many rows fill the memory, what follows a rejected node is left out.
    assert (find(memory.keys, 11, 14) >= 0) == (num_rows < MANY_ROWS)


def test_a_known_context_is_searched_again_only_where_a_path_ends() -> None:
    rows = rows_of([[1, 2]])
    drafter = drafter_for(rows)
    memory = drafter._memory
    assert memory is not None
    drafter.observe(Step(rows, DraftTree.empty(1), take(rows, ([], [1])), logits_of([{5: LIKELY}])))
    draft = DraftTree.from_rows([([2, 3], [ROOT, ROOT])])
    logits = logits_of([{}, {6: LIKELY}, {7: LIKELY}])
    for path, expected in (([], 5), ([1], 5), ([0], 6)):
        emitted = [int(draft.token_ids[node]) for node in path] + [1]
        drafter.observe(Step(rows, draft, take(rows, (path, emitted)), logits))
        assert memory.tokens[find(memory.keys, 1, 2), 0] == expected
    assert memory.tokens[find(memory.keys, 1, 3), 0] == 7


def test_the_last_logits_other_candidates_are_guesses_for_the_next_token() -> None:
    rows = rows_of([[1, 2]])
    drafter = drafter_for(rows, top_k=2, num_next=2)
    verdict = take(rows, ([], [20]))
    drafter.observe(
        Step(rows, DraftTree.empty(1), verdict, logits_of([{20: LIKELY, 21: POSSIBLE}]))
    )
    tree = drafter.propose(rows, 8)
    assert tree.token_ids[0] == 21
    assert tree.evidence is not None
    assert tree.evidence.bucket[0] >= NEXT_START
    # They stand for one step only.
    drafter.observe(
        Step(rows, DraftTree.empty(1), take(rows, ([], [22])), logits_of([{22: LIKELY}]))
    )
    assert 21 not in drafter.propose(rows, 8).token_ids


def test_logits_on_their_way_and_at_hand_teach_the_same() -> None:
    learned = []
    for ahead in (False, True):
        rows = rows_of([[1, 2]])
        drafter = drafter_for(rows)
        logits = logits_of([{3: LIKELY, 4: POSSIBLE}]).bfloat16()
        step = Step(rows, DraftTree.empty(1), take(rows, ([], [3])), logits)
        drafter.observe(replace(step, _best=BestTokens(logits, 48, 12)) if ahead else step)
        learned.append(drafter.propose(rows, 6).token_ids.tolist())
    assert learned[0] == learned[1] != []


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    max_nodes=st.integers(0, 30),
    top_k=st.integers(1, 4),
    num_next=st.integers(1, 6),
)
def test_trees_grow_by_what_is_known_of_the_last_tokens(
    seed: int, max_nodes: int, top_k: int, num_next: int
) -> None:
    rng = np.random.default_rng(seed)
    memory = LogitsMemory(top_k, capacity=64)
    count = int(rng.integers(0, 12))
    tokens = np.array([rng.permutation(6)[:top_k] for _ in range(count)]).reshape(-1, top_k)
    tokens[np.arange(top_k) >= rng.integers(0, top_k + 3, (count, 1))] = -1
    # Few distinct probabilities and rates, so that ties occur.
    probs = rng.choice([0.05, 0.1, 0.3, 0.7, 1.0], tokens.shape)
    memory.remember(
        rng.integers(-1, 6, count), rng.integers(0, 6, count),
        tokens.astype(np.int32), probs.astype(np.float32),
    )  # fmt: skip
    others = np.array([rng.permutation(6)[:num_next] for _ in range(2)]).astype(np.int32)
    others[:, rng.integers(0, num_next + 1) :] = -1
    contexts, live = rng.integers(0, 6, (2, 2)), rng.random(2) < 0.8
    *fields, offsets, buckets = compiled.grow_trees(
        memory.keys, memory.tokens, memory.probs, contexts,
        others, rng.choice([0.0, 0.04, 0.3], others.shape).astype(np.float32),
        live, rng.choice([0.0, 0.2, 0.5], NUM_BUCKETS).astype(np.float32), max_nodes, 1e-4,
    )  # fmt: skip
    tree = DraftTree(*fields)
    assert_ordered(tree, max_nodes)
    assert {*np.diff(offsets).tolist()} <= {1, 2} and offsets[-1] == len(buckets)
    for row, context in enumerate(contexts.tolist()):
        grown = paths(tree, row)
        assert live[row] or not grown
        for path in grown:
            before, last = [*context, *path[:-1]][-2:]
            entries = find(memory.keys, before, last), find(memory.keys, -1, last)
            entry = entries[0] if entries[0] >= 0 else entries[1]
            known = {*memory.tokens[entry].tolist()} if entry >= 0 else set()
            assert path[-1] in known or path[-1:] == path and path[0] in others[row]
