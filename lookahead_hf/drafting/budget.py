"""How many nodes to verify: as many as bring the most tokens per second, none where none pay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lookahead_hf.draft import DraftTree, place_in_row
from lookahead_hf.drafting.cost_model import CostCurve, CostModel
from lookahead_hf.rows import Rows

FIRST_SIZE = 7
"""Nodes up to whose size a step may go while no cost is known; then the greatest measured size may
double."""


class Budget:
    """Chooses the number of draft nodes per row, the same for all rows of a step.

    With "auto" it takes the size n of the greatest E[tokens(n)] / cost(n): the nodes' calibrated
    probabilities say what to expect, and the cost is measured. No draft at all is one of the sizes.
    """

    def __init__(
        self,
        size: str | int,
        max_nodes: int,
        costs: CostModel,
        rows: Rows,
        placement: str = "",
        mode: Callable[[], str] = str,
        sizes: Callable[[], tuple[int, ...] | None] = lambda: None,
    ) -> None:
        """Budget one call.

        Args:
            size: "auto", or the number of nodes that every step drafts if it can.
            max_nodes: Most nodes per row.
            costs: What is known of the model's costs.
            rows: The texts of the call.
            placement: Whatever changes the cost of a forward beside rows, length and mode.
            mode: How the runner runs its steps just now.
            sizes: The sizes that its steps are padded to just now, None if they are not.
        """
        self._fixed = None if size == "auto" else int(size)
        self.most_nodes = max_nodes if self._fixed is None else min(self._fixed, max_nodes)
        self._costs, self._rows, self._placement = costs, rows, placement
        self._mode, self._sizes = mode, sizes
        self._is_first = True
        self._curve = self._curve_for_length()

    def choose(self, tree: DraftTree) -> int:
        """Nodes per row that are worth verifying.

        Args:
            tree: The draft, each row's nodes best first; `score` is the calibrated probability that
                the path down to the node is accepted.
        """
        most = tree.max_nodes
        if self._fixed is not None:
            return min(self._fixed, most)
        if self._is_first:  # the prefill has settled how steps are run
            self._curve = self._curve_for_length()
        curve = self._curve
        most = min(most, curve.size_for(max(2 * curve.greatest_size, FIRST_SIZE)))
        if curve.is_due(0) and not self._is_first:
            return 0  # all other sizes are compared with the plain step
        sizes = np.array([*(n for n in curve.sizes if n < most), most])
        gain = np.bincount(place_in_row(tree.row_offsets), weights=tree.score, minlength=most)
        tokens = float(self._rows.live.sum()) + np.concatenate([np.zeros(1), gain.cumsum()])[sizes]
        return int(sizes[(tokens / curve.seconds(sizes, hopeful=True)).argmax()])

    def observe(self, draft: DraftTree, step_seconds: float | None) -> None:
        """Learn from a step.

        Args:
            draft: What was verified.
            step_seconds: Time of the step without drafting; None if it did other work as well.
        """
        if not self._is_first and step_seconds is not None:
            self._curve.observe(draft.max_nodes, step_seconds)
        self._is_first = False  # the first step after a prefill also allocates and warms up
        self._curve = self._curve_for_length()

    def _curve_for_length(self) -> CostCurve:
        rows = self._rows
        length = rows.prompt_columns + int(rows.num_emitted.max(initial=0))
        place = rows.num_rows, length, self._placement
        return self._costs.curve(*place, self._mode(), self._sizes())
