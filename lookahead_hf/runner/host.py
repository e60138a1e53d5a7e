"""Runs the steps of one call: blocks of draft tokens, kept or rolled back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lookahead_hf import compat
from lookahead_hf.cache.adopt import AdoptedCache
from lookahead_hf.call import execution
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.model import compiled
from lookahead_hf.model_state import state_of
from lookahead_hf.patches.forward import ForwardContext, running
from lookahead_hf.rows import Rows
from lookahead_hf.runner import non_finite
from lookahead_hf.runner.layout import BlockInputs
from lookahead_hf.runner.outputs import StepOutputs
from lookahead_hf.runner.prefill import PromptRunner


class Runner(PromptRunner):
    """Runs a model with ragged rows, in a cache that it takes over for the length of a call.

    Attributes:
        most_nodes: Most nodes that a row's draft can have, None for any number.
    """

    most_nodes: int | None = None

    @property
    def mode(self) -> str:
        """How steps are run now, "compiled" or "": their cost depends on it."""
        return execution.COMPILED if self._steps is not None and self._steps.is_used else ""

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Nodes per row that drafts are padded to, from 0 on; None if a block is like its draft."""
        is_padded = self._is_compiled and self._shape is None
        return node_counts(compiled.WIDTHS) if is_padded else None

    @property
    def step_is_typical(self) -> bool:
        """Whether the latest step was one forward and nothing else, so that its time is typical.

        The first block of a size takes up to a fifth longer: oneDNN prepares its kernels for it.
        """
        was_timed = self._steps is not None and self._steps.was_timed
        return not (self._is_repeat or self._is_new or was_timed)

    def launch(self, rows: Rows, draft: DraftTree) -> StepOutputs:
        """Lay out a step and run it.

        Args:
            rows: The texts.
            draft: The draft behind their last tokens.

        Returns:
            Its outputs; the logits are [rows, 1 + most nodes or more, vocab].
        """
        if not self.is_flat:
            return self.forward(self.layout(rows, draft))
        return self.run(self.fed_tokens(rows), draft)

    def launch_again(self, rows: Rows) -> StepOutputs:
        """Launch a step from its last tokens alone, where memory ran out in it or behind it."""
        self.roll_back()
        step = self.launch(rows, DraftTree.empty(self.num_rows))
        self._is_new = True  # its time is that of two launches
        return step

    def roll_back(self) -> None:
        """Keep nothing of the latest step; a runner that commits on the host has kept nothing."""

    def fed_tokens(self, rows: Rows) -> list[np.ndarray]:
        """Return what a flat block feeds before a draft: each live row's last token."""
        last, live = rows.last_tokens, rows.live.tolist()
        return [last[r : r + 1] if live[r] else last[:0] for r in range(len(live))]

    def run(
        self, fed: Sequence[np.ndarray], draft: DraftTree, is_prompt: bool = False
    ) -> StepOutputs:
        """Run a flat block: any tokens of any rows, whether of prompts or behind them.

        Of what a row was fed, all tokens but the last are kept in the cache at once. `commit` keeps
        the last one with the accepted path if the row emits a token. Where it emits none, since its
        prompt goes on, `keep` does, or the next block feeds the token again.

        Args:
            fed: As in `BlockLayout.flat`.
            draft: The draft behind these tokens.
            is_prompt: Whether all of them are of prompts, whose linear layers keep plain's bits.

        Returns:
            Its outputs; the logits are [rows, 1 + most nodes, vocab].
        """
        step = self.forward(self._layout.flat(fed, draft), is_prompt)
        self.keep(np.array([max(len(tokens) - 1, 0) for tokens in fed]))
        return step

    def layout(self, rows: Rows, draft: DraftTree) -> BlockInputs:
        """Give every token of the block its slot, column, position and mask."""
        width = 1 + draft.max_nodes
        if self._shape is not None:
            width = max(width, self._shape.width)
        elif self._is_compiled:
            width = compiled.width_for(width)
            compiled.make_room(self.cache.slots, self.cache.slots.longest + width)
        tokens, _, depths = draft.padded(width, rows.last_tokens)
        ahead = self._ahead(rows)
        # A text that has ended may do so at the last position that a table has.
        ahead = np.minimum(ahead, ahead[rows.live].max(initial=0))
        return self._layout.block(tokens, depths, draft, ahead)

    def _ahead(self, rows: Rows) -> np.ndarray:
        """Tokens of each row that were fed since the prompt, [rows]."""
        return rows.num_emitted - 1

    def forward(self, inputs: BlockInputs, is_prompt: bool = False) -> StepOutputs:
        """Run the model on a block; its logits are [rows, width, vocab]."""
        given, device = inputs.model_inputs, self._next_position.device
        experts = compat.set_up_for_step(self.model, *given[self._names.ids].shape)
        mixers = {} if self.recurrent is None else self.recurrent.forwards
        context = ForwardContext(inputs.trees, inputs.flat, inputs.columns, mixers)
        steps = None if is_prompt else self._steps

        def run() -> Any:
            return self.model(**given, return_dict=True)

        with running(context, device), experts:
            outputs = run() if steps is None else steps.run(run, inputs.num_tokens, inputs.flat)
        if steps is not None:
            self.execution = execution.COMPILED if steps.is_used else execution.MODEL
        self.num_fed += inputs.num_tokens
        kind = self.mode, inputs.num_tokens, inputs.flat is not None
        known = state_of(self.model).run_blocks
        self._is_new = kind not in known
        known.add(kind)
        logits, states = outputs.logits, compat.last_hidden_states(outputs)
        if inputs.flat is not None:
            logits = inputs.flat.of_rows(logits)
            states = states if states is None else inputs.flat.states_of_rows(states)
        return StepOutputs(logits=logits, of_model=outputs, hidden_states=states)

    def check_for_nan(self, step: StepOutputs, live: np.ndarray) -> bool:
        """Look for NaN in the logits of a step, and note that it was not repeated so far.

        Args:
            step: The step.
            live: Rows whose text goes on, [rows] bool.

        Returns:
            Whether its draft may have made NaN of the logits of a live row.
        """
        self._is_repeat = False
        return bool(((self._has_nan(step) > 0) & live & ~self._is_nan_alone).any())

    def repeat_without_draft(self, rows: Rows) -> StepOutputs:
        """Run a step again from its last tokens alone, in slots that no draft has written."""
        non_finite.clear(self.cache.slots)
        self.roll_back()
        step = self.launch(rows, DraftTree.empty(self.num_rows))
        self._is_nan_alone |= self._has_nan(step) > 0
        self._is_repeat = True
        return step

    def _has_nan(self, step: StepOutputs) -> np.ndarray:
        """Count NaN in a sample of the logits of each row, [rows]."""
        found: np.ndarray = non_finite.has_nan(step.logits).cpu().numpy()
        return found

    def commit(self, verdict: Verdict) -> None:
        """Keep each live row's last token and accepted path in the cache, and nothing else."""
        accepted = verdict.num_accepted
        if len(verdict.path):
            self._close_gaps(verdict, accepted)
        self.keep(np.where(verdict.num_emitted > 0, accepted + 1, 0))

    def _close_gaps(self, verdict: Verdict, accepted: np.ndarray) -> None:
        """Move the accepted paths together, unless they are chains already."""
        identity = np.arange(1 + int(accepted.max()))
        path = np.tile(identity, (self.num_rows, 1))
        for row, count in enumerate(accepted.tolist()):
            path[row, 1 : 1 + count] = verdict.accepted(row) + 1
        if (path != identity).any():
            self.cache.slots.compact(path, accepted + 1)

    def end(self) -> None:
        """End the call; its cache was handed back, or nobody needs it."""

    def hand_back(self, num_fed: int) -> compat.Cache:
        """Return the cache as plain leaves it after `num_fed` tokens behind the prompt.

        A recurrent state cannot go back. If a row has gone further, or an exception left the layers
        apart, the cache is returned empty, and a later call on it reads the text again.
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
        """Run further tokens of every row in one forward; `keep` then keeps them in the cache.

        Args:
            tokens: Tokens per row, the last token of the row first; rows may have none.
            ahead: Tokens of each row that were fed since the prompt, [rows].
        """
        width = max(map(len, tokens))
        block = np.zeros((self.num_rows, width), np.int64)
        for row, fed in enumerate(tokens):
            block[row, : len(fed)] = fed
            block[row, len(fed) :] = fed[-1] if fed else 0  # padding, as in `layout`
        draft = DraftTree.from_chains([[row[1:]] for row in tokens])
        return Runner.forward(self, self._layout.block(block, draft.padded(width)[2], draft, ahead))

    def keep(self, counts: np.ndarray) -> None:
        """Keep the first tokens of the latest block in every row, [rows]."""
        if self.recurrent is not None:
            self.recurrent.keep(counts)
        self.cache.slots.lengths += counts


def node_counts(widths: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many nodes blocks of these widths hold beside the last token, the fewest first."""
    return tuple(sorted(width - 1 for width in widths))
