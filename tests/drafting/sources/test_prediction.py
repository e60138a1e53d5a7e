"""The drafter that follows the caller's guess of the answer."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch

from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting.drafter import Step
from lookahead_hf.drafting.ensemble import merge
from lookahead_hf.drafting.rates import Calibration
from lookahead_hf.drafting.sources.prediction import PredictionDrafter
from lookahead_hf.rows import Rows
from tests.helpers.drafts import decided, emit, paths

NO_LOGITS = torch.empty(0)


def begun(predictions: list[list[int]], first: list[int]) -> tuple[PredictionDrafter, Rows]:
    """A drafter whose rows have emitted one token each."""
    rows = Rows(np.full((len(first), 2), 999))
    emit(rows, [[token] for token in first])
    drafter = PredictionDrafter([np.array(prediction, np.int64) for prediction in predictions])
    drafter.begin(rows)
    return drafter, rows


def step(drafter: PredictionDrafter, rows: Rows, draft: DraftTree, truth: list[int]) -> int:
    """Let the only row emit what the target would: the accepted tokens of `truth` and one more."""
    verdict = decided(draft, truth)
    emit(rows, [verdict.token_ids.tolist()])
    drafter.observe(Step(rows, draft, verdict, NO_LOGITS))
    return len(verdict.token_ids)


def steps_for(prediction: list[int], text: list[int], max_nodes: int = 32) -> int:
    """Steps in which a target emits `text` after its first token."""
    drafter, rows = begun([prediction], text[:1])
    calibration = Calibration([drafter])
    drafter.rates = calibration.rates
    done, steps = 1, 0
    while done < len(text):
        draft = merge([drafter.propose(rows, max_nodes)], calibration, max_nodes)
        assert len({tuple(path) for path in paths(draft)}) == draft.num_nodes
        before = done
        done += step(drafter, rows, draft, text[done:])
        assert rows.emitted(0).tolist() == text[:done]
        assert done > before
        steps += 1
    assert (calibration.rates > 0).all()
    return steps


NEWLINE, INDENT = 1, 2


def source_file(num_lines: int = 40, seed: int = 0) -> list[list[int]]:
    """Lines of 6 to 14 tokens; few words are frequent, all end alike and many begin alike."""
    rng = np.random.default_rng(seed)
    lines = []
    for length in rng.integers(4, 12, num_lines):
        words = 3 + rng.zipf(1.4, length) % 300
        lines.append([INDENT, *words.tolist(), NEWLINE])
    return lines


def joined(lines: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lines))


@pytest.mark.parametrize(
    ("truth", "expected"),
    [
        ([11, 99, 13], [13, 14, 15, 16]),
        ([11, 99, 12], [12, 13, 14, 15, 16]),
        ([11, 14, 15], [15, 16]),
    ],
    ids=["replaced", "inserted", "deleted"],
)
def test_after_an_edited_token_it_goes_on_behind_it(truth: list[int], expected: list[int]) -> None:
    drafter, rows = begun([[10, 11, 12, 13, 14, 15, 16]], [10])
    step(drafter, rows, drafter.propose(rows, 8), truth)
    assert expected in paths(drafter.propose(rows, 8))


def test_ambiguous_places_share_their_prefix() -> None:
    # The text comes back with "7 8", which stands in three places: two go on alike at first.
    prediction = [10, 11, 12, 7, 8, 20, 21, 9, 7, 8, 20, 22, 9, 7, 8, 30]
    drafter, rows = begun([prediction], [10])
    draft = drafter.propose(rows, 8)
    step(drafter, rows, draft, [11, 90])
    for token in (91, 92, 93, 94, 7, 8):
        step(drafter, rows, DraftTree.empty(1), [token])
    found = paths(drafter.propose(rows, 16))
    assert [20, 21] in found
    assert [20, 22] in found
    assert [30] in found
    assert found.count([20]) == 1


def test_the_same_text_takes_as_few_steps_as_the_nodes_allow() -> None:
    text = joined(source_file())
    assert steps_for(text, text) == -(-(len(text) - 1) // 33)


@pytest.mark.parametrize("edit", ["insert", "delete", "replace"])
def test_lines_after_an_edit_are_found_again(edit: str) -> None:
    edited, other = source_file(), source_file(num_lines=3, seed=7)
    new_lines = {"insert": other, "delete": [], "replace": other[:2]}[edit]
    edited[20 : 20 if edit == "insert" else 22] = new_lines
    text = joined(edited)
    # Every new token costs a step, finding the place again a few more.
    unchanged = -(-len(text) // 33)
    assert steps_for(joined(source_file()), text) <= unchanged + len(joined(new_lines)) + 3


@pytest.mark.parametrize(
    ("name", "other", "extra"),
    [([950], [998], 6), ([950, 951, 952], [960, 951, 961, 962], 12)],
    ids=["a token", "several tokens"],
)
def test_a_renaming_costs_steps_at_two_places(
    name: list[int], other: list[int], extra: int
) -> None:
    lines = source_file()
    for line in lines[::3]:
        line[2:2] = name
    prediction, text = joined(lines), joined([replaced(line, name, other) for line in lines])
    assert text.count(other[-1]) > 10
    assert steps_for(prediction, text) <= -(-len(text) // 33) + extra


def test_a_text_that_others_have_begun_is_followed_through_its_edits() -> None:
    lines = source_file()
    for line in lines[::3]:
        line[2:2] = [950]
    lines[2:2] = [[NEWLINE, 970, 971, 972, NEWLINE]]
    prediction = joined(lines)
    del lines[2]
    text = joined([replaced(line, [950], [998]) for line in lines])
    begun_at = text.index(998, len(text) // 2) - 3
    drafter, rows = begun([prediction], text[:1])
    emit(rows, [text[1:begun_at]])
    drafter.begin(rows)
    chain = text[begun_at : begun_at + 8]  # with the new name, which stands before it
    assert 998 in chain
    assert chain in paths(drafter.propose(rows, 8))


def replaced(line: list[int], old: list[int], new: list[int]) -> list[int]:
    for at in range(len(line)):
        if line[at : at + len(old)] == old:
            return [*line[:at], *new, *line[at + len(old) :]]
    return line


def test_an_unrelated_text_is_not_disturbed() -> None:
    prediction = joined(source_file())
    text = np.random.default_rng(3).integers(400, 800, 60).tolist()
    assert steps_for(prediction, text) == len(text) - 1
