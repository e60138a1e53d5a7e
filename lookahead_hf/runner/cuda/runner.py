"""The target of a call that is verified on the device: one launch and one copy per step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lookahead_hf.cache.slots import SlotCache
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.kernels import RowScan
from lookahead_hf.rows import Rows
from lookahead_hf.runner import spoiled, torch_compile
from lookahead_hf.runner.cuda import graphs
from lookahead_hf.runner.cuda.capture import Recording, Step
from lookahead_hf.runner.cuda.graph_set import GraphSet, Uncapturable, bucket
from lookahead_hf.runner.cuda.step import MAX_WIDTH, DeviceStep, StepState, only_group, pack
from lookahead_hf.runner.cuda.transfer import HostCopy, Ticket
from lookahead_hf.runner.guards import Frozen
from lookahead_hf.runner.host import BlockShape, Runner

ALIGNED = 16
"""Slots that the attention sees come in multiples of it: torch copies any other mask per layer."""

CHANGED = "the model was changed in the middle of the call"
BUSY = "other steps are being captured"
"""Why steps are run, for the time being, though there are graphs."""


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """A step whose draft is on its way to the device."""

    rows: Rows
    draft: DraftTree
    width: int
    visible: int


@dataclass(frozen=True, slots=True)
class Scores:
    """What the tokens of a step are chosen by.

    Attributes:
        values: Processed logits, or probabilities, [rows, width, vocab].
        noise: Noise by depth, which goes with probabilities, [rows, depths, vocab].
        is_finite: Whether a node's probabilities are, [rows, width] int64.
    """

    values: torch.Tensor
    noise: torch.Tensor | None = None
    is_finite: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DeviceOutputs:
    """A step that was launched.

    Attributes:
        logits: The target's, [rows, width, vocab]; valid until the next step.
        copy: Brings to the host what was added to it.
        walk: `TreeWalk.packed`, [rows, 2 + width].
        not_finite: Whether NaN is among the logits of a row, [rows].
        is_finite: As in `Scores`.
    """

    logits: torch.Tensor
    copy: HostCopy
    walk: Ticket
    not_finite: Ticket
    is_finite: Ticket | None


Scoring = Callable[[Rows, DraftTree, torch.Tensor], Scores]
"""`(rows, draft, logits [rows, width, vocab])` to what the tokens are chosen by."""


class CudaRunner(Runner):
    """Lays out, forwards, walks and commits without a word to the host.

    Attributes:
        graphs: "replayed", or why the steps are launched one operation after the other.
    """

    most_nodes = MAX_WIDTH - 1

    def __init__(
        self,
        model: Any,
        num_rows: int,
        shape: BlockShape | None = None,
        *,
        scoring: Scoring | None = None,
        room: int = 0,
        cuda_graphs: str | bool = "auto",
    ) -> None:
        """Prepare for one call.

        Args:
            model: The target.
            num_rows: Rows of the batch.
            shape: The shape of every block, None for as large as each draft needs.
            scoring: Alters the logits; None where the likeliest token is chosen.
            room: Slots that the call may need behind the longest prompt.
            cuda_graphs: As in `SpeculativeConfig`.
        """
        super().__init__(model, num_rows, shape)
        self._scoring, self._room, self._wanted = scoring, room, cuda_graphs
        self._set: GraphSet | None = None
        self._replays = True  # as the latest step was
        self._is_compiled = torch_compile.is_compiled(model)
        self.execution: str | None = "not asked for"

    def _take_over(self, *args: Any, **kwargs: Any) -> None:
        super()._take_over(*args, **kwargs)
        assert self.cache is not None
        self._state = StepState(self.cache, self._next_position)
        self._enter_graphs()
        self._step = DeviceStep(
            self.model, self.cache, self._state, self._extras, self._kinds, self._mask_dict
        )

    @property
    def mode(self) -> str:
        return "device" if self._set is None or not self._replays else "graphs"

    @property
    def _trims(self) -> bool:
        return False  # one layout for all layers, whatever their windows

    def _enter_graphs(self) -> None:
        """Move into the model's graphs, where there are any or may be."""
        assert self.cache is not None
        if self._wanted is False:
            return
        reason = graphs.refusal(self.model, self._state.lengths.device, self._extras)
        if reason is not None:
            self.execution = reason
            return
        slots = self.cache.slots.longest + self._room + graphs.WIDTHS[0]
        shape = self._scoring is None, str(self._extras), self._shape is None
        insists = self._wanted is True
        create = insists or self._room >= graphs.WORTHWHILE
        self._frozen = Frozen(self.model)  # before the graphs are chosen that go with it
        try:
            self._set = graphs.enter(
                self.model, self.cache, self._state, shape, slots, create=create, insists=insists
            )
        except Uncapturable as error:
            self.execution = str(error)
            return
        self._state = self._set.state

    def layout(self, rows: Rows, draft: DraftTree) -> DeviceInputs:  # type: ignore[override]
        """Send the draft to the device."""
        assert self.cache is not None
        slots = self.cache.slots
        width = 1 + draft.max_nodes
        if self._shape is not None:
            width = max(width, self._shape.width)
        elif self._set is not None or self._is_compiled:
            width = min(w for w in self._widths if w >= width)
        visible = self._visible(slots, slots.longest + width)
        self._state.load(pack(rows, draft, slots.lengths, width), width)
        return DeviceInputs(rows, draft, width, visible)

    @property
    def _widths(self) -> tuple[int, ...]:
        """Tokens per row that the blocks can have where each number takes a preparation."""
        return torch_compile.WIDTHS if self._is_compiled else graphs.WIDTHS

    def _visible(self, slots: SlotCache, used: int) -> int:
        """Slots that the attention sees; there is room for them."""
        assert self.cache is not None
        if self._set is not None:
            return self._set.visible_for(slots.shown or used)
        if self._is_compiled and self._shape is None:
            shown = torch_compile.make_room(slots, used)
            self._state.fit(self.cache)
            return shown
        visible = -(-used // ALIGNED) * ALIGNED
        if slots.shown is not None:  # with and without graphs the same
            visible = bucket(slots.shown)
        only_group(self.cache).reserve(visible)
        self._state.fit(self.cache)
        return visible

    def forward(self, inputs: DeviceInputs) -> DeviceOutputs:  # type: ignore[override]
        """Launch the step; nothing waits for the device."""
        logits, *decided = self._launch(inputs.width, inputs.visible)
        finite = None
        if self._scoring is None:
            packed, *scan = decided
            copy = HostCopy(RowScan(*scan) if scan else None)
        else:
            copy = HostCopy()
            scores = self._scoring(inputs.rows, inputs.draft, logits)
            packed = self._step.decide(inputs.width, scores.values, scores.noise).packed
            finite = None if scores.is_finite is None else copy.add(scores.is_finite)
        walk, not_finite = copy.add(packed), copy.add(spoiled.not_finite(logits))
        copy.send()
        return DeviceOutputs(logits, copy, walk, not_finite, finite)

    def repeat_alone(self, rows: Rows) -> DeviceOutputs:
        self.forget()
        outputs: DeviceOutputs = super().repeat_alone(rows)
        return outputs

    def _not_finite(self, outputs: DeviceOutputs) -> np.ndarray:
        return outputs.not_finite.take()

    def _launch(self, width: int, visible: int) -> Step:
        """Replay the step, or run it where it was not recorded or is not what was recorded."""
        recording = self._recording(width, visible)
        self._replays = recording is not None
        if recording is None:
            return self._run(width, visible)
        recording.replay()
        if self._frozen.is_current():  # looked at while the device works
            self.execution = "replayed"
            return recording.outputs
        self._replays, self.execution = False, CHANGED
        self._state.lengths.copy_(self._state.draft(width).kept)
        return self._run(width, visible)

    def _recording(self, width: int, visible: int) -> Recording | None:
        """What repeats a step; None where it is run."""
        if self._set is None:
            return None
        found = self._set.recordings.get((width, visible))
        # As long as steps are replayed the model is looked at behind the launch.
        if (found is None or not self._replays) and not self._frozen.is_current():
            self.execution = CHANGED
            return None
        return found or self._capture(width, visible)

    def _run(self, width: int, visible: int) -> Step:
        if self._scoring is None:
            return self._step.run(width, visible)
        return (self._step.forward(width, visible),)

    def _capture(self, width: int, visible: int, *, waits: bool = False) -> Recording | None:
        """Record the steps that show so many slots.

        Returns:
            None where that fails, which ends the use of graphs, or where it has to be later.
        """
        assert self._set is not None
        widths = list(self._widths) if self._shape is None else [width]
        packed = self._state.save(width)
        try:
            if not self._set.capture(visible, self._run, widths, waits=waits):
                self.execution = BUSY
                return None
        except Uncapturable as error:
            self.execution = str(error)
            self._leave_graphs(error)
            return None
        finally:
            self._state.restore(packed, width)
        self._frozen = Frozen(self.model)  # a forward may note something on its modules
        return self._set.recordings[width, visible]

    def capture(self) -> None:
        """Record the steps of all lengths that fit the call, rather than when they come up."""
        assert self.cache is not None
        slots = self.cache.slots.longest + max(self._widths)
        while self._set is not None:
            visible = self._set.visible_for(slots)
            self._capture(max(self._widths), visible, waits=True)
            if self._set is None or visible == self._set.capacity:
                return
            slots = visible + 1

    def forget(self) -> None:
        """Keep nothing of the latest step, on the device either."""
        assert self.cache is not None
        self._state.lengths.copy_(torch.from_numpy(self.cache.slots.lengths))

    def _leave_graphs(self, error: Uncapturable | None = None) -> None:
        used, self._set = self._set, None
        if used is not None:
            graphs.leave(self.model, used, error)

    def end(self) -> None:
        """Make room for the next call; the cache was handed back."""
        self._leave_graphs()

    def commit(self, verdict: Verdict) -> int:
        """Note what the device has kept; see `Target.commit`."""
        assert self.cache is not None
        accepted = verdict.num_accepted
        self.cache.slots.lengths += np.where(verdict.num_emitted > 0, accepted + 1, 0)
        place = np.arange(len(verdict.path)) - np.repeat(verdict.path_offsets[:-1], accepted)
        return int((verdict.path != place).sum())
