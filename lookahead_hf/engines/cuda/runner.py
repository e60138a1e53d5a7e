"""Runs a model on a CUDA device: one launch and one copy per step."""

from __future__ import annotations

from functools import partial
from typing import Any

from lookahead_hf.block.layout import BlockShape, PromptState
from lookahead_hf.call import admission, execution
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.engines.cuda import graphs
from lookahead_hf.engines.cuda.capture import Captured, Recording
from lookahead_hf.engines.cuda.graphs import GraphSet, Uncapturable, bucket
from lookahead_hf.engines.cuda.step import MAX_WIDTH, StepFunction, StepState, pack
from lookahead_hf.kernels.data import RowScan
from lookahead_hf.rows import Rows
from lookahead_hf.runner import watch
from lookahead_hf.runner.host import Runner, StepOptions
from lookahead_hf.runner.outputs import DeviceOutputs, HostCopy, Scoring, StepOutputs, has_nan
from lookahead_hf.runner.watch import Watch


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
        return step.run(width, visible) if self.is_captured else step.forward(width, visible)

    def outputs(
        self, step: StepFunction, rows: Rows, draft: DraftTree, width: int, captured: Captured
    ) -> DeviceOutputs:
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


ALIGNED = 16  # Divides the visible slots: torch copies any other mask once per layer


def runner(options: StepOptions) -> Runner | None:
    """Return the runner of a call on a device, None if steps cannot stay there."""
    model = options.model
    may_stay = options.is_alone and not options.observes  # which graphs do not return
    if not (may_stay and admission.on_device(model, model.device)):
        return None
    return CudaRunner(
        model,
        options.num_rows,
        options.shape,
        decision=OnDevice(options.scoring) if options.decides else OnHost(),
        room=options.num_new,
        cuda_graphs=options.cuda_graphs,
    )


class CudaRunner(Runner):
    """Runs steps that stay on the device, from CUDA graphs where they can be captured.

    Attributes:
        decision: Who chooses the tokens, which a queue decides anew before each step.
    """

    most_nodes = MAX_WIDTH - 1

    def __init__(
        self,
        model: Any,
        num_rows: int,
        shape: BlockShape | None = None,
        *,
        decision: Decision | None = None,
        room: int = 0,
        cuda_graphs: str | bool = "auto",
    ) -> None:
        """Prepare for one call, as `Runner` does.

        `decision` chooses the tokens; by default the device takes the likeliest ones. `room` is the
        most slots that the call may need behind the longest prompt.
        """
        super().__init__(model, num_rows, shape)
        self.decision: Decision = OnDevice() if decision is None else decision
        self._room, self._wanted = room, cuda_graphs
        self._most = 0  # slots that the texts of a queue need
        self._decides = self.decision.is_captured  # in the graphs of most steps
        self._set: GraphSet | None = None
        self._replays = True  # the latest step was replayed
        self.execution: str | None = execution.NOT_ASKED_FOR

    def begin(self, beginning: PromptState) -> None:
        super().begin(beginning)
        self._prepare(beginning)

    def _prepare(self, beginning: PromptState) -> None:
        if self._wanted is not False:
            self._enter_graphs(beginning)
        if self._set is not None:
            self._state = self._set.state
        else:
            self._state = StepState(self.cache, beginning.next_position)
        self._function = StepFunction(self.model, beginning, self._state)
        # A call that ends with its first token has no step, and no position for one.
        tries = self._shape is None and self._room > 1
        if tries and self._set is not None and self._set.reads_masks is None:
            self._try_masks(self._set)

    def make_room(self, num_tokens: int) -> None:
        needed = num_tokens + MAX_WIDTH
        self._most = max(self._most, bucket(needed))
        if self._set is not None and needed > self._set.capacity:
            self.renew()

    def renew(self) -> None:
        self._leave_graphs()
        if self.beginning is not None:
            self._prepare(self.beginning)

    @property
    def mode(self) -> str:
        how = "device" if self._set is None or not self._replays else "graphs"
        return how + self.decision.mode

    @property
    def _creates(self) -> bool:
        if self._wanted == "auto":
            return self._room >= graphs.WORTHWHILE
        return bool(self._wanted)

    def _enter_graphs(self, beginning: PromptState) -> None:
        """Move into a set of the model's graphs, if it has one for the call or may make one."""
        self._watch = self._watched()
        reasons = watch.blockers(self.model, beginning.passed)
        if reasons:
            self.execution = reasons[0]
            return
        self._graphs = graphs.graphs_of(self.model)
        arguments = repr(sorted(beginning.passed.items()))
        kind = self._watch.key, self._decides, arguments, self._shape is None
        slots = max(self.cache.slots.extent.longest + self._room + MAX_WIDTH, self._most)
        given = self.cache, beginning.next_position, slots, self._creates
        try:
            self._set = self._graphs.enter(kind, *given)
        except Uncapturable as error:
            self.execution = str(error)

    def _watched(self) -> Watch:
        return Watch(self.model.modules(), is_graph=True)

    def _try_masks(self, used: GraphSet) -> None:
        """Find out whether a layer reads its mask; else one graph of a width serves all lengths."""
        try:
            used.try_masks(self._function.try_masks, self.cache.slots.lengths)
            # A forward may set attributes of its modules.
            self._watch = self._watched()
        except Uncapturable as error:
            self._leave_graphs(error)

    def launch(self, rows: Rows, draft: DraftTree) -> StepOutputs:
        """Launch a step, as `Runner.launch` does; nothing waits for the device."""
        self._is_new = False
        width, visible = self._sizes(draft)
        self.num_fed += self.num_rows * width
        self._share(self.num_rows * width, rows.live)
        recording = self._recording(width, visible)  # first: a capture writes to the draft
        self._state.load(pack(rows, draft, self.cache.slots.lengths, width), width)
        captured = self._replay_or_run(recording, width, visible)
        return self.decision.outputs(self._function, rows, draft, width, captured)

    def _sizes(self, draft: DraftTree) -> tuple[int, int]:
        """Return the width of a draft's block and the visible slots, and make room for them."""
        width = 1 + draft.max_nodes
        if self._shape is not None:
            width = max(width, self._shape.width)
        elif self._set is not None:
            width = min((each for each in self._widths if each >= width), default=width)
        self._drop_unseen(width)
        return width, self._visible(self.cache.slots.extent.longest + width)

    def _drop_unseen(self, width: int) -> None:
        """Make room for a block in layers with a window by dropping what no later token sees."""
        for index, group in enumerate(self.cache.slots.each_group()):
            if group.window is None:
                continue
            before = group.dropped
            group.drop_unseen(group.longest + width)
            needed = group.longest + width
            if self._set is not None and needed > group.capacity:
                # A cache that is handed back keeps for all rows what the slowest still sees.
                self._leave_graphs(Uncapturable(execution.TOO_FAR_APART))
            if self._set is None:
                group.reserve(needed, width)
            elif group.dropped is not before:
                self._set.move(index, group)
        self._state.fit(self.cache)

    @property
    def _widths(self) -> tuple[int, ...]:
        return graphs.widths_for(self.num_rows)

    @property
    def sizes(self) -> tuple[int, ...] | None:
        if self._set is None or self._shape is not None:
            return super().sizes
        return tuple(width - 1 for width in reversed(self._widths))

    def _visible(self, used: int) -> int:
        """Make room for so many slots; return how many of them the attention sees."""
        slots = self.cache.slots
        if self._set is not None:
            return self._set.visible_for(slots.extent.shown or used)
        visible = -(-used // ALIGNED) * ALIGNED
        if slots.extent.shown is not None:  # the same with and without graphs
            visible = bucket(slots.extent.shown)
        slots.reserve(visible)
        self._state.fit(self.cache)
        return visible

    def _replay_or_run(self, recording: Recording | None, width: int, visible: int) -> Captured:
        """Replay the step, or run it if it was not captured or the model has changed since."""
        self._replays = recording is not None
        if recording is None:
            return self._run(width, visible)
        recording.replay()
        if self._watch.is_current():  # checked while the device works
            self.execution = execution.REPLAYED
            return recording.outputs
        self._replays, self.execution = False, execution.CHANGED
        self._is_new = True  # the step is run twice
        return self._run(width, visible)

    def _recording(self, width: int, visible: int) -> Recording | None:
        """Return the captured step, captured now if it is new; None if no graph serves it."""
        if self._set is None:
            return None
        if self._shape is None and width not in self._widths:
            self.execution = execution.TOO_WIDE
            return None
        found = self._set.recordings.get((width, visible, self.decision.is_captured))
        # While steps are replayed, the model is checked behind each launch.
        if (found is None or not self._replays) and not self._watch.is_current():
            self.execution = execution.CHANGED
            return None
        return found or self._capture(width, visible)

    def _run(self, width: int, visible: int) -> Captured:
        return self.decision.run(self._function, width, visible)

    def _capture(self, width: int, visible: int) -> Recording | None:
        """Capture a step; if that fails, return None and use no more graphs in this call."""
        assert self._set is not None
        self._is_new = True  # a capture takes longer than many steps
        step, lengths = (width, visible, self.decision.is_captured), self.cache.slots.lengths
        try:
            recording = self._set.capture(step, partial(self._run, width, visible), lengths)
        except Uncapturable as error:
            self._leave_graphs(error)
            return None
        self._watch = self._watched()  # as in `_try_masks`
        return recording

    def capture(self) -> None:
        """Capture the steps of all widths and lengths that fit the call."""
        widest = max(self._widths)
        self._drop_unseen(widest)
        slots = self.cache.slots.extent.longest + widest
        while self._set is not None:
            visible = self._set.visible_for(slots)
            for width in self._widths:
                if self._set is not None:
                    self._recording(width, visible)
            if self._set is None or visible == self._set.capacity:
                return
            slots = visible + 1

    def _leave_graphs(self, error: Uncapturable | None = None) -> None:
        """Leave the graphs to other calls, or for good because of an error."""
        if error is not None:
            self.execution = str(error)
        used, self._set = self._set, None
        if used is not None:
            self._graphs.leave(used, error)

    def end(self) -> None:
        """Let the next call use the graphs; the cache was handed back."""
        self._leave_graphs()

    def _close_gaps(self, verdict: Verdict) -> None:
        if not self.decision.keeps:
            super()._close_gaps(verdict)
