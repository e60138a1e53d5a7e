"""Several sources as one drafter."""

from __future__ import annotations

from typing import Any

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.drafting.ensemble import Ensemble
from lookahead_hf.drafting.rates import Calibration
from lookahead_hf.rows import Rows
from lookahead_hf.stats import SourceStats
from tests.helpers.drafts import rows_of


class Chains(Drafter):
    """Proposes the same chains for every row."""

    def __init__(self, name: str, *chains: list[int]) -> None:
        self.name = name  # type: ignore[misc]
        self.chains = chains

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        return DraftTree.from_chains([self.chains] * rows.num_rows)


def ensemble_of(*sources: Drafter, **options: Any) -> Ensemble:
    return Ensemble(sources, Calibration(sources), 2, **options)


def step(tree: DraftTree, path: list[int], bonus: int) -> Verdict:
    tokens = [*tree.token_ids[path].tolist(), bonus]
    return Verdict.from_rows([tokens], [path])


def test_counts_tell_sources_of_one_name_apart_and_what_only_one_of_them_knew() -> None:
    ensemble = ensemble_of(Chains("custom", [1, 2], [5]), Chains("custom", [1, 3]))
    rows = rows_of([[0, 1, 2, 3, 4]])
    tree = ensemble.propose(rows, 8)
    path = [tree.token_ids.tolist().index(1), tree.token_ids.tolist().index(3)]
    ensemble.observe(rows, tree, step(tree, path, 7), None)  # type: ignore[arg-type]
    assert ensemble.source_stats() == {
        "custom": SourceStats(drafted=3, accepted=1, exclusive=0),
        "custom_2": SourceStats(drafted=2, accepted=2, exclusive=1),
    }


def test_finished_rows_and_tokens_beyond_the_end_are_not_drafted() -> None:
    ensemble = ensemble_of(Chains("a", [1, 2, 3]), max_new_tokens=3)
    rows = rows_of([[0, 1, 2, 3, 4]] * 2)
    rows.finished[0] = True
    tree = ensemble.propose(rows, 8)
    # One token is emitted and the bonus token is the third: a single draft token is of use.
    assert tree.row_offsets.tolist() == [0, 0, 1]
    assert tree.token_ids.tolist() == [1]
