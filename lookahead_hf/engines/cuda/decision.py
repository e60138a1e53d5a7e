"""Who chooses the tokens of a step and keeps them in the cache: the device or the host."""

from __future__ import annotations

from lookahead_hf.draft import DraftTree
from lookahead_hf.engines.cuda.capture import Captured
from lookahead_hf.engines.cuda.step import StepFunction
from lookahead_hf.kernels import RowScan
from lookahead_hf.rows import Rows
from lookahead_hf.runner.outputs import DeviceOutputs, HostCopy, Scoring, StepOutputs, has_nan


class OnHost:
    """The host reads the logits, chooses the tokens and keeps them."""

    is_captured = False  # whether the captured part of a step chooses the tokens, too
    keeps = False  # whether the device keeps the accepted path in the cache
    draws: bool | None = None  # whether it chooses by other numbers than the logits
    mode = ", decided on the host"  # end of `Runner.mode`

    def run(self, step: StepFunction, width: int, visible: int) -> Captured:
        """Run the part of a step that can be captured."""
        return step.forward(width, visible)

    def outputs(
        self, step: StepFunction, rows: Rows, draft: DraftTree, width: int, captured: Captured
    ) -> StepOutputs:
        """Launch what follows the captured part, and return the step."""
        logits, states = captured
        return StepOutputs(logits=logits, hidden_states=states)


class OnDevice:
    """The device walks down the tree and keeps the path; the host reads what it has decided."""

    keeps = True
    mode = ""

    def __init__(self, scoring: Scoring | None = None) -> None:
        """Choose the likeliest tokens, or by what `scoring` makes of the logits."""
        self._scoring = scoring
        self.is_captured, self.draws = scoring is None, scoring is not None

    def run(self, step: StepFunction, width: int, visible: int) -> Captured:
        """See `OnHost.run`."""
        return step.run(width, visible) if self.is_captured else step.forward(width, visible)

    def outputs(
        self, step: StepFunction, rows: Rows, draft: DraftTree, width: int, captured: Captured
    ) -> DeviceOutputs:
        """See `OnHost.outputs`."""
        logits, states, *decided = captured
        scan = finite = None
        if self._scoring is None:
            packed, *found = decided
            scan = RowScan(*found) if found else None
        else:
            scores = self._scoring(rows, draft, logits)
            packed = step.decide(width, scores.values, scores.noise).packed
            finite = scores.is_finite
        copy = HostCopy(scan, packed, step.num_nodes(width))
        is_finite = None if finite is None else copy.add(finite)
        walk, num_nan = copy.add(packed), copy.add(has_nan(logits))
        copy.send()
        return DeviceOutputs(
            logits=logits,
            hidden_states=states,
            copy=copy,
            walk=walk,
            num_nan=num_nan,
            is_finite=is_finite,
        )


Decision = OnHost | OnDevice
