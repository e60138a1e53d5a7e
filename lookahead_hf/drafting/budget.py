"""How many nodes to verify: as many as bring the most tokens per second, none where none pay."""

from __future__ import annotations

import numpy as np

from lookahead_hf.drafting.costs import KEPT_SAMPLES, SIZES, CostCurve, CostModel
from lookahead_hf.rows import Rows
from lookahead_hf.steps import DraftTree, Verdict

FIRST_TRIES = (8, 16, 32, 4, 64, 2, 24, 12, 48, 1, 128, 96, 192, 256)
"""Sizes in the order in which an unknown curve is measured: where drafts mostly pay, first."""

BLIND_SIZE = 4
"""Most nodes of a step while no cost is known; from there on the known range may double."""

TRY_EVERY = 3
"""Drafted steps per step that measures a size whose cost is hardly known."""

REVISIT_EVERY = 32
"""Drafted steps per step that measures a size again that may have become cheaper."""

RENEW_AFTER = (1, 4, 16, 128)
"""Drafted steps before a plain step measures the cost that all others are compared with, by how
often that was done."""

FIRST_REST, LONGEST_REST = 8, 128
"""Steps before drafting is tried again; doubled with every try that does not pay."""

TRY_SIZE = 8
"""Most nodes of the first step after a rest: what failed before is tried cheaply."""

PATIENCE = 3
"""Steps in a row without a draft worth its cost until drafting rests."""

CHEAP = 0.01
"""Part of a plain step that drafting may take to go on proposing while it rests."""

SURE = 1.25
"""How much faster than a plain step a draft must look to be taken in a rest after failures."""

RECOVERY = 8
"""Steps in a row that paid until the next rest is a short one again."""


class Budget:
    """Chooses the number of draft nodes per row, the same for all rows of a step.

    With "auto" it takes the size n of the greatest E[tokens(n)] / (cost(n) + drafting): the nodes'
    calibrated probabilities say what to expect, corrected by how such promises were kept, and the
    cost is measured. No draft at all is one of the sizes; where it wins again and again drafting
    rests, for growing intervals, and is then tried again. If proposing costs next to nothing, a
    draft that looks very good is taken in a rest, too: a text may begin to copy at any token.
    """

    def __init__(
        self, setting: str | int, max_nodes: int, costs: CostModel, rows: Rows, engine: str = ""
    ) -> None:
        """Budget one call.

        Args:
            setting: "auto", or the number of nodes that every step drafts if it can.
            max_nodes: Most nodes per row.
            costs: What is known of the model's costs.
            rows: The texts of the call.
            engine: Whatever changes the cost of a forward beside rows and length.
        """
        self._fixed = None if setting == "auto" else int(setting)
        self._max_nodes = max_nodes
        self._costs, self._rows, self._engine = costs, rows, engine
        self._trust, self._pace, self._rest = Trust(), Pace(), Rest()
        self._asked = self._in_rest = False
        self._draft_seconds: float | None = None
        self._num_steps = 0
        self._num_drafted = 0
        self._curve = self._curve_for_length()
        self._plain_due = self._next_plain_step()

    def wanted(self) -> int:
        """Nodes per row to ask the drafter for in this step; 0 while drafting rests."""
        if self._fixed is not None:
            return min(self._fixed, self._max_nodes)
        self._in_rest = self._rest.is_resting
        if self._in_rest and self._rest.step():
            self._trust.ease()
        self._asked = self._is_cheap or not self._in_rest
        return self._max_nodes if self._asked else 0

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
        if self._rest.is_trying:
            most = min(most, TRY_SIZE)
        sizes = np.array([*(n for n in SIZES if n < most), most])
        tokens = self._expected_tokens(tree)[sizes]
        rates = tokens / self._seconds(sizes)
        best = int(rates.argmax())
        if self._in_rest:
            asked = SURE if self._rest.has_failed else 1.0
            return int(sizes[best]) if rates[best] > asked * rates[0] else 0
        chosen = self._size_to_measure(sizes, tokens, best) or int(sizes[best])
        self._rest.note_offer(pays=chosen > 0)
        return chosen if self._plain_due > 0 else 0

    def observe(
        self, draft: DraftTree, verdict: Verdict, step_seconds: float, draft_seconds: float
    ) -> None:
        """Learn from a step.

        Args:
            draft: What was verified.
            verdict: What came of it.
            step_seconds: Time of the step without drafting.
            draft_seconds: Time of proposing and learning.
        """
        self._num_steps += 1
        if self._num_steps > 1:  # the first step after a prefill also allocates and warms up
            self._curve.observe(draft.max_nodes, step_seconds)
        if self._asked:
            known = draft_seconds if self._draft_seconds is None else self._draft_seconds
            self._draft_seconds = 0.9 * known + 0.1 * draft_seconds
        if draft.max_nodes:
            self._observe_draft(draft, verdict)
        else:
            self._plain_due = self._next_plain_step()
        curve = self._curve_for_length()
        if curve is not self._curve:
            self._curve, self._plain_due = curve, min(self._plain_due, RENEW_AFTER[1])

    def _observe_draft(self, draft: DraftTree, verdict: Verdict) -> None:
        self._plain_due -= 1
        self._num_drafted += 1
        self._trust.observe(float(draft.score.sum()), len(verdict.path))
        if self._curve.num_samples(0):
            # Estimates on both sides: a disturbed step says nothing about drafting.
            seconds = float(self._seconds(np.array([draft.max_nodes]))[0])
            self._pace.observe(verdict, seconds, self._curve.plain_seconds)
            self._rest.note_outcome(pays=not self._pace.is_behind)

    @property
    def _is_cheap(self) -> bool:
        return self._drafting <= CHEAP * self._curve.plain_seconds

    @property
    def _drafting(self) -> float:
        """Seconds that drafting takes in a step, 0 while unknown."""
        return self._draft_seconds or 0.0

    def _next_plain_step(self) -> int:
        """Drafted steps from now until a plain one is due."""
        return RENEW_AFTER[min(self._curve.num_samples(0), len(RENEW_AFTER) - 1)]

    def _curve_for_length(self) -> CostCurve:
        rows = self._rows
        length = rows.prompt_columns + int(rows.num_emitted.max(initial=0))
        return self._costs.curve(rows.num_rows, length, self._engine)

    def _seconds(self, sizes: np.ndarray) -> np.ndarray:
        """What steps with so many nodes per row are expected to take, drafting included."""
        return self._curve.seconds(sizes) + self._drafting * (sizes > 0)

    def _expected_tokens(self, tree: DraftTree) -> np.ndarray:
        """Tokens that a step is expected to emit over all rows, by nodes per row, [1 + most]."""
        sizes = np.diff(tree.row_offsets)
        rank = np.arange(tree.num_nodes) - np.repeat(tree.row_offsets[:-1], sizes)
        gain = np.bincount(rank, weights=tree.score, minlength=tree.max_nodes)
        gained = np.concatenate([np.zeros(1), gain.cumsum()])
        return float(self._rows.live.sum()) + self._trust.factor * gained

    def _size_to_measure(
        self,
        sizes: np.ndarray,  # [sizes] ascending
        tokens: np.ndarray,  # [sizes] expected tokens
        best: int,
    ) -> int:
        """A size that would beat the best one if it cost what its neighbours suggest; 0: none."""
        revisit = self._num_drafted % REVISIT_EVERY == REVISIT_EVERY - 1
        if best and self._num_drafted % TRY_EVERY and not revisit:
            return 0
        trying = self._rest.is_trying
        enough = KEPT_SAMPLES + 1 if revisit else KEPT_SAMPLES // 2 if trying else 2
        expected = dict(zip(sizes.tolist(), tokens.tolist(), strict=True))
        known = float(tokens[best] / self._seconds(sizes[best]))
        for size in FIRST_TRIES:
            if size in expected and self._curve.num_samples(size) < enough:
                seconds = self._curve.seconds_at_best(size, hopeful=trying) + self._drafting
                if expected[size] / seconds > known:
                    return size
        return 0


class Trust:
    """How far the promised acceptance was kept lately."""

    def __init__(self) -> None:
        self._promised = 0.0
        self._accepted = 0.0

    @property
    def factor(self) -> float:
        """What a promise is worth: 1 at first and where promises are kept, less where not."""
        return min(1.0, (2.0 + self._accepted) / (2.0 + self._promised))

    def observe(self, promised: float, accepted: float) -> None:
        """Note a step's expected and actual number of accepted nodes."""
        self._promised = 0.95 * self._promised + promised
        self._accepted = 0.95 * self._accepted + accepted

    def ease(self) -> None:
        """Let what was seen before a rest count half."""
        self._promised *= 0.5
        self._accepted *= 0.5


class Pace:
    """Tokens per second of the latest drafted steps beside what plain steps would have made."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._tokens = self._seconds = 0.0
        self._plain_tokens = self._plain_seconds = 0.0

    def observe(self, verdict: Verdict, seconds: float, plain_seconds: float) -> None:
        """Note a step and how long a plain one takes."""
        self._num_steps += 1
        self._tokens = 0.9 * self._tokens + len(verdict.token_ids)
        self._seconds = 0.9 * self._seconds + seconds
        self._plain_tokens = 0.9 * self._plain_tokens + int(verdict.live.sum())
        self._plain_seconds = 0.9 * self._plain_seconds + plain_seconds

    @property
    def is_behind(self) -> bool:
        """Whether enough steps were seen and plain ones would have been faster."""
        slower = self._tokens * self._plain_seconds < self._plain_tokens * self._seconds
        return self._num_steps >= 6 and slower


class Rest:
    """When to stop drafting and when to try again.

    Attributes:
        is_trying: A rest has just ended and nothing was drafted since.
        has_failed: Drafts were not accepted; otherwise it is good ones that are missing.
    """

    def __init__(self) -> None:
        self.is_trying = False
        self.has_failed = False
        self._left = 0
        self._length = FIRST_REST
        self._misses = 0
        self._hits = 0

    @property
    def is_resting(self) -> bool:
        """Whether nothing is drafted now."""
        return self._left > 0

    def note_offer(self, pays: bool) -> None:
        """Note whether a draft looked worth its cost; after a rest a single one decides."""
        self._misses = 0 if pays else self._misses + 1
        if self._misses >= (1 if self.is_trying else PATIENCE):
            self.begin(has_failed=False)
        self.is_trying = False

    def note_outcome(self, pays: bool) -> None:
        """Note whether the latest drafts were worth their cost; if so, a rest is over."""
        self._hits = self._hits + 1 if pays else 0
        if self._hits >= RECOVERY:
            self._length = FIRST_REST
        if pays:
            self._left = 0
        elif self.is_resting:
            self.has_failed = True
        else:
            self.begin(has_failed=True)

    def begin(self, has_failed: bool) -> None:
        """Stop drafting for a while."""
        self.has_failed = has_failed
        self._left, self._length = self._length, min(2 * self._length, LONGEST_REST)
        self._misses = 0

    def step(self) -> bool:
        """Count a step; returns whether a rest has just ended."""
        self._left = max(0, self._left - 1)
        self.is_trying = self._left == 0
        return self.is_trying
