"""The number of nodes to verify: what brings the most tokens per second, possibly none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lookahead_hf.draft import DraftTree, place_in_row
from lookahead_hf.drafting.costs import SIZES, CostModel
from lookahead_hf.rows import Rows

if TYPE_CHECKING:
    from lookahead_hf.runner.host import Runner

FIRST_SIZE = 7
"""Nodes per row that a step may have while no cost is known. Later the largest measured may double.
"""

LIKELY = 0.5
"""Nodes at least this likely may exceed that size: no measured cost curve makes them a loss."""

PATIENCE = 0.5
"""Expected tokens per row that a due plain step may give up, per step that it has waited. Short
answers often copy in their very first steps."""

MOST_TOGETHER = 384
"""Most nodes that all rows together are offered; no device verifies more for free. For 32 rows,
trees of 12 nodes take a quarter less time than trees of 16."""

SAVED_SHARE = 0.6
"""Steps a static batch saves, as a share of what it would save if all rows accepted equally.
Measured in batches of 4 and 8: 0.4 to 1.0, lower when few tokens are accepted."""

SPREAD = 0.2
"""Relative uncertainty of the steps that rows are expected to need."""


@dataclass
class FixedRunner:
    """Replaces a runner for drafting without a model: the properties that budgets depend on."""

    mode: str = ""
    sizes: tuple[int, ...] | None = None
    most_nodes: int | None = None
    is_flat: bool = False
    has_one_shape: bool = False


class Budget:
    """Chooses the number of draft nodes of each row.

    "auto" takes the size n of the greatest E[tokens(n)] / cost(n), from the nodes' calibrated
    probabilities and the measured cost; 0 is one of the sizes. If blocks are padded to the widest
    row, all rows may draft n nodes. If they are flat, the n likeliest nodes of all rows are taken.

    A static batch takes as long as its slowest row. So a row's tokens count more, the likelier the
    row is to end last; otherwise drafts of the other rows could make a batch slower.
    """

    def __init__(
        self,
        size: str | int,
        max_nodes: int,
        costs: CostModel,
        rows: Rows,
        runner: Runner | FixedRunner,
        placement: str = "",
        num_new: int | None = None,
    ) -> None:
        """Budget one call with at most `max_nodes` per row.

        `size` is "auto", or the number of nodes that every step drafts if it can. Texts have at
        most `num_new` tokens; None if other texts take over finished rows.
        """
        self._fixed = None if size == "auto" else int(size)
        together = max(1, MOST_TOGETHER // max(1, rows.num_rows))
        most = together if self._fixed is None else self._fixed
        self.most_nodes = min(most, max_nodes)
        self._costs, self._rows, self._placement = costs, rows, placement
        self._runner, self._is_flat = runner, runner.is_flat
        self._num_new, self._num_steps = num_new, 0
        self._is_first = True
        self._find_curve()

    def choose(self, tree: DraftTree) -> np.ndarray:
        """Return how many nodes of each row's tree, best first, are worth verifying, [rows].

        Drawn nodes always are: a choice among them by their tokens would change the distribution.
        """
        counts: np.ndarray = np.diff(tree.row_offsets)
        taken = self._worthwhile(tree, counts)
        if tree.drawn is None:
            return taken
        row = np.repeat(np.arange(len(counts)), counts)
        return np.maximum(taken, np.bincount(row[tree.drawn >= 0], minlength=len(counts)))

    def _worthwhile(self, tree: DraftTree, counts: np.ndarray) -> np.ndarray:
        if self._fixed is not None:
            return np.minimum(counts, self._fixed)
        if self._is_flat or self._is_first:  # rows may have begun, the prefill settled the mode
            self._find_curve()
        row = np.repeat(np.arange(len(counts)), counts)
        worth = tree.score * self._weights()[row]
        if not self._is_flat:
            place = place_in_row(tree.row_offsets)
            gain = np.bincount(place, weights=worth, minlength=1)
            best = self._best_count(gain, tree.max_nodes)
            taken = np.minimum(counts, best)
        else:
            order = np.argsort(-worth, kind="stable")  # parents stay before their children
            gain = worth[order]
            best = self._best_count(gain, tree.num_nodes)
            taken = np.bincount(row[order[:best]], minlength=len(counts))
        overdue = -1 if self._is_first else self._curve.overdue(self._plain)
        measures_plain = gain[:best].sum() <= PATIENCE * (overdue + 1) * self._rows.live.sum()
        return np.zeros_like(counts) if overdue >= 0 and measures_plain else taken

    def _weights(self) -> np.ndarray:
        """Return the weight of each row's tokens, [rows]."""
        emitted, live = self._rows.num_emitted, self._rows.live
        if self._num_new is None or live.sum() < 2:
            return np.ones(len(live))
        # The first steps tell little of a row's pace: 8 of 1.5 tokens are assumed before them.
        pace = (emitted + 12) / (self._num_steps + 8)
        left = np.where(live, (self._num_new - emitted) / pace, -np.inf)  # steps
        most = float(left.max())
        is_last = np.exp((left - most) / (SPREAD * most + 1))
        is_last /= is_last.sum()
        return SAVED_SHARE * live.sum() * is_last

    def _best_count(self, gain: np.ndarray, most: int) -> int:
        """Return the number of nodes, up to `most`, that brings the most tokens per second.

        `gain` is the tokens expected from each further node, [nodes].
        """
        curve, plain, live = self._curve, self._plain, int(self._rows.live.sum())
        room, bar = (FIRST_SIZE * live, LIKELY) if self._is_flat else (FIRST_SIZE, LIKELY * live)
        first = plain + max(room, int((gain > bar).sum()))
        greatest = curve.size_for(max(2 * curve.greatest_size, first)) - plain
        most = max(0, min(most, greatest))
        known = SIZES if self._is_flat else curve.sizes
        nodes = np.array([*(n for n in known if n < most), most])
        tokens = live + np.concatenate([np.zeros(1), gain.cumsum()])[nodes]
        return int(nodes[(tokens / curve.optimistic_seconds(plain + nodes)).argmax()])

    def observe(self, draft: DraftTree, step_seconds: float | None) -> None:
        """Learn from a step and its time without drafting, None if it also did other work."""
        if not self._is_first and step_seconds is not None:
            nodes = draft.num_nodes if self._is_flat else draft.max_nodes
            self._curve.observe(self._plain + nodes, step_seconds)
        self._num_steps += 1
        self._is_first = False  # the first step after a prefill also allocates and warms up
        self._find_curve()

    def _find_curve(self) -> None:
        """Find the cost curve for the present lengths and, if blocks are flat, live rows."""
        rows = self._rows
        length = rows.prompt_columns + int(rows.num_emitted.max(initial=0))
        count = max(1, int(rows.live.sum())) if self._is_flat else rows.num_rows
        steps = self._placement, self._runner.mode, self._runner.sizes, self._is_flat
        self._curve = self._costs.curve(count, length, *steps)
        self._plain = count if self._is_flat else 0  # the size of a step without a draft
