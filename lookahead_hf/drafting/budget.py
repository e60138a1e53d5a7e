"""How many nodes to verify: as many as bring the most tokens per second, none where none pay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lookahead_hf.draft import DraftTree, Verdict, place_in_row
from lookahead_hf.drafting.cost_model import SIZES, CostCurve, CostModel
from lookahead_hf.drafting.guard import Rest, Trust
from lookahead_hf.rows import Rows

FIRST_TRIES = (8, 16, 32, 4, 64, 2, 24, 12, 48, 1, 128, 96, 192, 256)
"""Sizes in the order in which an unknown curve is measured: where drafts mostly pay, first."""

BLIND_SIZE = 4
"""Most nodes of a step while no cost is known; from there on the known range may double."""

TRY_EVERY = 3
"""Drafted steps per step that measures a size whose cost is hardly known."""

DOUBT_EVERY = 16
"""Steps without a draft per step that measures a size again that looked too dear."""

RENEW_AFTER = (1, 4, 16, 128)
"""Drafted steps before a plain step measures the cost that all others are compared with, by how
often that was done."""

MARGIN = 1.02
"""How much faster than a plain step a draft must look to be verified."""


class Budget:
    """Chooses the number of draft nodes per row, the same for all rows of a step.

    With "auto" it takes the size n of the greatest E[tokens(n)] / (cost(n) + drafting): the nodes'
    calibrated probabilities say what to expect, less where such promises were lately not kept, and
    the cost is measured. No draft at all is one of the sizes; where it wins again and again nothing
    is proposed for some steps, the more the dearer proposing is: a text may begin to copy at any
    token, and a cheap drafter sees it at once.
    """

    def __init__(
        self,
        setting: str | int,
        max_nodes: int,
        costs: CostModel,
        rows: Rows,
        engine: str = "",
        mode: Callable[[], str] = str,
    ) -> None:
        """Budget one call.

        Args:
            setting: "auto", or the number of nodes that every step drafts if it can.
            max_nodes: Most nodes per row.
            costs: What is known of the model's costs.
            rows: The texts of the call.
            engine: Whatever changes the cost of a forward beside rows and length.
            mode: How the target runs its steps just now.
        """
        self._fixed = None if setting == "auto" else int(setting)
        self._max_nodes = max_nodes
        self._costs, self._rows, self._engine, self._mode = costs, rows, engine, mode
        self._trust, self._rest = Trust(), Rest()
        self._drafting = 0.0
        self._num_steps = 0
        self._num_drafted = 0
        self._num_declined = 0
        self._curve = self._curve_for_length()
        self._plain_due = self._next_plain_step()

    def wanted(self) -> int:
        """Nodes per row to ask the drafter for in this step; 0 while drafting rests."""
        if self._fixed is not None:
            return min(self._fixed, self._max_nodes)
        asks = self.asks_next
        self._rest.step()
        return self._max_nodes if asks else 0

    @property
    def asks_next(self) -> bool:
        """Whether the step after this one will want a draft."""
        return self._fixed != 0 and not self._rest.is_resting

    def choose(self, tree: DraftTree) -> int:
        """Nodes per row that are worth verifying.

        Args:
            tree: The draft, each row's nodes best first; `score` is the calibrated probability that
                the path down to the node is accepted.
        """
        most = tree.max_nodes
        if self._fixed is not None:
            return min(self._fixed, most)
        most = min(most, max(2 * self._curve.greatest_size, BLIND_SIZE))
        sizes = np.array([*(n for n in SIZES if n < most), most])
        sure, gained = float(self._rows.live.sum()), self._promised(tree)[sizes]
        tokens = sure + self._trust.factor * gained
        rates = tokens / self._seconds(sizes)
        best = int(rates.argmax())
        if rates[best] <= MARGIN * rates[0]:
            best = 0
        promised = dict(zip(sizes.tolist(), gained.tolist(), strict=True))
        chosen = int(sizes[best])
        chosen = self._size_to_measure(promised, sure, chosen, float(rates[best])) or chosen
        self._rest.note_offer(chosen > 0, self._drafting / self._curve.plain_seconds)
        self._num_declined = 0 if chosen else self._num_declined + 1
        return chosen if self._plain_due > 0 else 0

    def observe(
        self, draft: DraftTree, verdict: Verdict, step_seconds: float, draft_seconds: float
    ) -> None:
        """Learn from a step.

        Args:
            draft: What was verified.
            verdict: What came of it.
            step_seconds: Time of the step without drafting.
            draft_seconds: Time that proposing and learning take in a step with a draft.
        """
        self._num_steps += 1
        if self._num_steps > 1:  # the first step after a prefill also allocates and warms up
            self._curve.observe(draft.max_nodes, step_seconds)
        self._drafting = draft_seconds
        if draft.max_nodes:
            self._observe_draft(draft, verdict)
        else:
            self._trust.fade()
            self._plain_due = self._next_plain_step()
        curve = self._curve_for_length()
        if curve is not self._curve:
            self._curve, self._plain_due = curve, min(self._plain_due, RENEW_AFTER[1])

    def _observe_draft(self, draft: DraftTree, verdict: Verdict) -> None:
        self._plain_due -= 1
        self._num_drafted += 1
        live = max(int(verdict.live.sum()), 1)
        self._trust.observe(float(draft.score.sum()) / live, len(verdict.of_text.path) / live)

    def _next_plain_step(self) -> int:
        """Drafted steps from now until a plain one is due."""
        return RENEW_AFTER[min(self._curve.num_samples(0), len(RENEW_AFTER) - 1)]

    def _curve_for_length(self) -> CostCurve:
        rows = self._rows
        length = rows.prompt_columns + int(rows.num_emitted.max(initial=0))
        return self._costs.curve(rows.num_rows, length, self._engine, self._mode())

    def _seconds(self, sizes: np.ndarray) -> np.ndarray:
        """What steps with so many nodes per row are expected to take, drafting included."""
        return self._curve.seconds(sizes) + self._drafting * (sizes > 0)

    def _promised(self, tree: DraftTree) -> np.ndarray:
        """Tokens that may be accepted over all rows, by nodes per row, [1 + most]."""
        rank = place_in_row(tree.row_offsets)
        gain = np.bincount(rank, weights=tree.score, minlength=tree.max_nodes)
        return np.concatenate([np.zeros(1), gain.cumsum()])

    def _size_to_measure(
        self,
        promised: dict[int, float],  # tokens that may be accepted, by size
        sure: float,  # tokens without a draft
        best: int,
        known: float,  # tokens per second of the best size
    ) -> int:
        """A size that would be better if it cost what its neighbours suggest; 0 if there is none.

        One that was never measured is tried at once, one that looked too dear now and then.
        """
        if best and self._num_drafted % TRY_EVERY:
            return 0
        doubts = not best and self._num_declined % DOUBT_EVERY == DOUBT_EVERY - 1
        enough = 2 if best or doubts else 1
        for size in FIRST_TRIES:
            samples = self._curve.num_samples(size)
            if size in promised and samples < enough:
                seconds = self._curve.seconds_at_best(size, hopeful=doubts) + self._drafting
                trust = self._trust.factor if samples else 1.0
                if sure + trust * promised[size] > known * seconds:
                    return size
        return 0
