"""Runs the steps of one call, by an engine or by the model's own code: kept or rolled back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lookahead_hf.block.layout import BlockLayout, BlockShape, Inputs, PromptState
from lookahead_hf.block.packed import PackedBlock
from lookahead_hf.cache.adopt import AdoptedCache
from lookahead_hf.cache.slots import ColumnCache
from lookahead_hf.call import execution, optional
from lookahead_hf.draft import DraftTree, Verdict, place_in_row
from lookahead_hf.model import compat
from lookahead_hf.model.facts import facts_of
from lookahead_hf.model.state import state_of
from lookahead_hf.ngram_pool import compilation
from lookahead_hf.rows import Rows
from lookahead_hf.runner.forward import ForwardContext, running
from lookahead_hf.runner.outputs import Scoring, StepOutputs


class Runner:
    """Runs a model on ragged rows, in a cache that it goes on with for the length of a call.

    Attributes:
        most_nodes: Most nodes of a row's draft, None for any number.
        execution: How steps ran, as in `SpeculativeStats`.
        num_fed: Tokens that the model was fed, padding included.
        step_tokens: Those that steps have fed for each row, [rows] int64; where blocks are padded,
            live rows have equal shares of all tokens.
        only_chains: Whether drafts must be chains, because of recurrent states.
        recurrent: The layers with such states, None without any or before the prompt.
        is_packed: Whether blocks are packed, see `block.packed`.
        steps: How an engine computes the layers, such as its `CompiledSteps`, None for
            their own code.
        own_code: Why the model's own code runs all layers, beside the reasons of `steps`.
        beginning: What steps go on from, None before the prompt was run.
    """

    most_nodes: int | None = None
    execution: str | None = execution.MODEL
    num_fed = 0
    own_code: tuple[str, ...] = ()

    def __init__(
        self,
        model: Any,
        num_rows: int,
        shape: BlockShape | None = None,
        steps: Any = None,
        is_packed: bool = False,
    ) -> None:
        """Prepare for one call.

        `shape` is that of every block, None to fit each draft; `steps` how an engine computes the
        layers, None for their own code.
        """
        self.model = model
        self.num_rows = num_rows
        self.beginning: PromptState | None = None
        self._shape = shape
        self.is_packed = is_packed
        self.steps = steps
        self.step_tokens = np.zeros(num_rows, np.int64)
        self._is_nan_alone = np.zeros(num_rows, bool)
        self._is_repeat = self._is_new = False
        self.only_chains = bool(facts_of(model).mixers)
        self._known_blocks = state_of(model).run_blocks
        self.recurrent: Any = None
        if self.only_chains and model.device.type == "cuda":
            self.execution = execution.STATES

    def begin(self, beginning: PromptState) -> None:
        """Go on behind prompts."""
        self.beginning, self._names = beginning, beginning.names
        slots = beginning.cache.slots
        if self._shape is not None:
            slots.fix(slots.extent.longest + self._shape.capacity)
        if self.only_chains:
            by_token = self._shape is not None
            states = optional.load("recurrent states")
            self.recurrent = states.RecurrentLayers(self.model, slots, self.num_rows, by_token)
        self._layout = BlockLayout(self.model, beginning, lazy=self.steps is not None)

    def make_room(self, num_tokens: int) -> None:
        """Prepare for texts of so many tokens; on the host, rows grow with their texts."""

    def capture(self) -> None:
        """Prepare steps of all sizes ahead of a call; on the host there is nothing to prepare."""

    def renew(self) -> None:
        """Go on with weights that may have changed."""
        self.steps = self.steps and self.steps.renewed()

    def forget_nan(self, row: int) -> None:
        """Let another text, which may show no NaN, take a row."""
        self._is_nan_alone[row] = False

    @property
    def ways(self) -> dict[str, Any]:
        """How steps ran, as fields of `SpeculativeStats`."""
        if self.steps is None:
            return {"execution": self.execution, "own_code": self.own_code}
        own_code = tuple(sorted(self.steps.reasons))
        return {"execution": self.execution, "layers": self.steps.counts, "own_code": own_code}

    def reads_prompts(self, longest: int = 1) -> bool:
        """Return whether kernels are to read prompts, the longest of which has so many tokens."""
        return self.steps is not None and self.steps.reads_prompts(longest)

    @property
    def has_one_shape(self) -> bool:
        """Whether all blocks have the same shape; layers with a window then hold the whole text."""
        return self._shape is not None

    @property
    def cache(self) -> ColumnCache:
        assert self.beginning is not None
        return self.beginning.cache

    @property
    def mode(self) -> str:
        """How steps run now, "compiled" or "", which their cost depends on."""
        return execution.COMPILED if self.steps is not None and self.steps.is_used else ""

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Numbers of nodes that drafts are padded to, from 0 on; None if they are not padded."""
        return None

    @property
    def step_is_typical(self) -> bool:
        """Whether the time of the latest step is that of one forward.

        The first block of a size takes up to a fifth longer: oneDNN prepares its kernels for it.
        """
        return not (self._is_repeat or self._is_new)

    def launch(self, rows: Rows, draft: DraftTree) -> StepOutputs:
        """Lay out a step and run it; its logits are [rows, 1 + most nodes or more, vocab]."""
        if self.is_packed:
            return self.run(self.fed_tokens(rows), draft)
        inputs = self.layout(rows, draft)
        self._share(inputs[0][self._names.ids].numel(), rows.live)
        return self.forward(inputs)

    def launch_beside(
        self, rows: Rows, draft: DraftTree, chunks: Mapping[int, np.ndarray]
    ) -> StepOutputs:
        """Launch a packed step that also reads next tokens of prompts, by row, [tokens] each."""
        fed = [chunks.get(row, last) for row, last in enumerate(self.fed_tokens(rows))]
        step = self.run(fed, draft)
        # At once: if the step is repeated without its draft, these tokens are in the cache.
        self.keep(np.array([min(1, len(chunks.get(row, ()))) for row in range(self.num_rows)]))
        self._is_new = True  # its time is not that of a step
        return step

    def _share(self, num_tokens: int, live: np.ndarray) -> None:
        shares = np.linspace(0, num_tokens, int(live.sum()) + 1)
        self.step_tokens[live] += np.diff(shares.astype(np.int64))

    def launch_again(self, rows: Rows) -> StepOutputs:
        """Launch a step without a draft after memory ran out in it or behind it."""
        step = self.launch(rows, DraftTree.empty(self.num_rows))
        self._is_new = True  # its time is that of two launches
        return step

    def fed_tokens(self, rows: Rows) -> list[np.ndarray]:
        """Return the tokens that a packed block feeds before a draft: each live row's last one."""
        last, live = rows.last_tokens, rows.live.tolist()
        return [last[r : r + 1] if live[r] else last[:0] for r in range(len(live))]

    def run(
        self, fed: Sequence[np.ndarray], draft: DraftTree, is_prompt: bool = False
    ) -> StepOutputs:
        """Run a packed block: any tokens of any rows, of prompts or behind them.

        All fed tokens of a row but the last are kept in the cache at once. `commit` keeps the last
        one with the accepted path if the row emits a token. If it emits none because its prompt
        goes on, `keep` does, or the next block feeds the token again.

        `fed` is as in `BlockLayout.packed`; prompts alone (`is_prompt`) run by the model's code.
        The logits are [rows, 1 + most nodes, vocab].
        """
        step = self.forward(self._layout.packed(fed, draft), is_prompt)
        num_fed = np.array([len(tokens) for tokens in fed])
        self.step_tokens += np.where(num_fed > 0, num_fed + np.diff(draft.row_offsets), 0)
        self.keep(np.maximum(num_fed - 1, 0))
        return step

    def layout(self, rows: Rows, draft: DraftTree) -> Inputs:
        """Give every token of the block its slot, column, position and mask."""
        width = 1 + draft.max_nodes
        if self._shape is not None:
            width = max(width, self._shape.width)
        # Without columns of a prompt, each row counts from the beginning of its text.
        ahead = (rows.num_emitted if self.cache.num_columns else rows.lengths) - 1
        # A finished row may already be at the last learned position and must not move past it.
        ahead = np.minimum(ahead, ahead[rows.live].max(initial=0))
        return self._layout.block(draft.padded(width, rows.last_tokens), ahead)

    def forward(self, inputs: Inputs, is_prompt: bool = False) -> StepOutputs:
        """Run the model on a block; its logits are [rows, width, vocab]."""
        given, block = inputs
        ids = given[self._names.ids]
        num_tokens = ids.numel()
        experts = compat.set_up_for_step(self.model, *ids.shape)
        mixers = {} if self.recurrent is None else self.recurrent.forwards
        packed = block if isinstance(block, PackedBlock) else None
        context = ForwardContext(block, mixers)
        steps = None if is_prompt else self.steps

        def run() -> Any:
            return self.model(**given, return_dict=True)

        with running(context, ids.device), experts:
            outputs = run() if steps is None else steps.run(run)
        if steps is not None:
            self.execution = execution.COMPILED if steps.is_used else execution.MODEL
        self.num_fed += num_tokens
        kind = self.mode, num_tokens, packed is not None
        self._is_new = kind not in self._known_blocks
        self._known_blocks.add(kind)
        logits, states = outputs.logits, compat.last_hidden_states(outputs)
        if packed is not None:
            logits = packed.of_rows(logits)
            states = states if states is None else packed.states_of_rows(states)
        return StepOutputs(logits=logits, of_model=outputs, hidden_states=states)

    def check_for_nan(self, step: StepOutputs, live: np.ndarray) -> bool:
        """Return whether a step's draft may have caused NaN in the logits of a live row."""
        self._is_repeat = False
        return bool(((step.count_nan() > 0) & live & ~self._is_nan_alone).any())

    def repeat_without_draft(self, rows: Rows) -> StepOutputs:
        """Run a step again without its draft, in cleared slots."""
        self.cache.slots.clear()
        step = self.launch(rows, DraftTree.empty(self.num_rows))
        self._is_nan_alone |= step.count_nan() > 0
        self._is_repeat = True
        return step

    def commit(self, verdict: Verdict) -> None:
        """Keep each live row's last token and accepted path in the cache, and nothing else."""
        if (verdict.path != place_in_row(verdict.path_offsets)).any():
            self._close_gaps(verdict)
        self.keep(np.where(verdict.num_emitted > 0, verdict.num_accepted + 1, 0))

    def _close_gaps(self, verdict: Verdict) -> None:
        accepted = verdict.num_accepted
        path = np.tile(np.arange(1 + accepted.max()), (self.num_rows, 1))
        for row, count in enumerate(accepted.tolist()):
            path[row, 1 : 1 + count] = verdict.accepted(row) + 1
        self.cache.slots.compact(path, accepted + 1)

    def end(self) -> None:
        """End the call, after its cache was handed back or became useless."""

    def hand_back(self, num_fed: int) -> compat.Cache:
        """Return the cache as plain generation leaves it after `num_fed` tokens behind the prompt.

        A recurrent state cannot go back. If a row has gone further, or an exception left the layers
        at different tokens, the cache is returned empty, and a later call reads the text again.
        """
        cache = self.cache
        assert isinstance(cache, AdoptedCache)
        if self.recurrent is not None:
            if not self.recurrent.are_at(num_fed):
                cache.original.layers = compat.empty_cache(self.model).layers
                return cache.original
            self.recurrent.settle()
        return cache.hand_back(cache.num_columns + num_fed)

    @property
    def fed(self) -> np.ndarray:
        """Tokens behind the prompt that each row has in the cache, [rows]."""
        return self.cache.slots.lengths - (self.cache.num_columns - self.cache.pads)

    def feed(self, tokens: list[list[int]], ahead: np.ndarray) -> StepOutputs:
        """Run more tokens of every row, its last one first, in a forward, for `keep` to keep."""
        fields = DraftTree.from_chains([[fed[1:]] for fed in tokens]).padded(max(map(len, tokens)))
        for row, fed in enumerate(tokens):
            fields[0, row, : len(fed)] = fed
            fields[0, row, len(fed) :] = fed[-1] if fed else 0  # padding, as in `layout`
        return self.forward(self._layout.block(fields, ahead))

    def keep(self, counts: np.ndarray) -> None:
        """Keep the first tokens of the latest block in every row, [rows]."""
        if self.recurrent is not None:
            self.recurrent.keep(counts)
        self.cache.slots.lengths += counts


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What a call asks of its steps."""

    model: Any  # the target
    num_rows: int  # rows of the batch
    num_new: int  # most new tokens of a row
    # Returns whether blocks may be packed, given whether kernels read prompts
    takes_packed: Callable[[bool], bool]
    shape: BlockShape | None = None  # the shape of every block, None to fit each draft
    compiled_layers: bool | str = True  # as in `SpeculativeConfig`, and so is `cuda_graphs`
    cuda_graphs: bool | str = "auto"
    is_alone: bool = True  # whether no other process runs parts of the forwards
    observes: bool = False  # whether the call reads further outputs of the forwards
    decides: bool = True  # whether the device is to choose the tokens
    scoring: Scoring | None = None  # makes scores of logits; None to take the likeliest tokens


def choose(name: str, options: StepOptions) -> Runner:
    """Return the runner of a call, from the engine of that name if it serves the call."""
    engine = optional.find(name)
    misses_engine = engine is None and name in optional.MODULES
    runner: Runner | None = None if engine is None else engine.runner(options)
    if runner is None:
        is_packed = options.takes_packed(False)
        runner = Runner(options.model, options.num_rows, options.shape, is_packed=is_packed)
        runner.own_code = (execution.NO_ENGINE,) if misses_engine else ()
    return runner


def groups_of(model: Any) -> list[compilation.Functions]:
    """Return the compiled functions that calls on a model need, in the order of need."""
    engine = optional.find("cpu") if model.device.type == "cpu" else None
    return [compilation.drafting] if engine is None else engine.groups_of(model)
