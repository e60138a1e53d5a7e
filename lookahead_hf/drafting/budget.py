"""How many nodes to verify: as many as bring the most tokens per second, none where none pay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lookahead_hf.draft import DraftTree, place_in_row
from lookahead_hf.drafting.cost_model import SIZES, CostCurve, CostModel
from lookahead_hf.rows import Rows

FIRST_SIZE = 8
"""Most nodes of a step while no cost is known; then the greatest measured size may double."""


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
    ) -> None:
        """Budget one call.

        Args:
            size: "auto", or the number of nodes that every step drafts if it can.
            max_nodes: Most nodes per row.
            costs: What is known of the model's costs.
            rows: The texts of the call.
            placement: Whatever changes the cost of a forward beside rows, length and mode.
            mode: How the runner runs its steps just now.
        """
        self._fixed = None if size == "auto" else int(size)
        self.most_nodes = max_nodes if self._fixed is None else min(self._fixed, max_nodes)
        self._costs, self._rows, self._placement, self._mode = costs, rows, placement, mode
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
        most = min(most, max(2 * self._curve.greatest_size, FIRST_SIZE))
        if self._curve.is_due(0) and not self._is_first:
            return 0  # all other sizes are compared with the plain step
        sizes = np.array([*(n for n in SIZES if n < most), most])
        gain = np.bincount(place_in_row(tree.row_offsets), weights=tree.score, minlength=most)
        tokens = float(self._rows.live.sum()) + np.concatenate([np.zeros(1), gain.cumsum()])[sizes]
        return int(sizes[(tokens / self._curve.seconds(sizes, hopeful=True)).argmax()])

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
        return self._costs.curve(rows.num_rows, length, self._placement, self._mode())
