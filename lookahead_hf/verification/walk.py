"""The walk: at each node score, choose, emit, ask the criteria, then step to the child."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from lookahead_hf.call.emitter import Emitter
from lookahead_hf.distributed.coordinator import Processes
from lookahead_hf.draft import ROOT, DraftTree, Verdict
from lookahead_hf.kernels import argmax
from lookahead_hf.logits.row_processors import RowProcessors
from lookahead_hf.rows import Rows
from lookahead_hf.verification.noise import Noise
from lookahead_hf.verification.rng import refuse_unless
from lookahead_hf.verification.verifier import Verifier

Decide = Callable[[int], tuple[int, int | None]]
"""Takes a node and returns the token after it and the child with that token, if any."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How a call chooses tokens.

    Attributes:
        processors: Logits processors and warpers, applied to a node with its own prefix.
        do_sample: Whether tokens are sampled; otherwise the likeliest is chosen.
        in_order: Whether the default generator itself draws, for tokens chosen in plain's order.
        seed: Samples are those of plain after `manual_seed(seed)`; None: the default generator's.
    """

    processors: RowProcessors
    do_sample: bool = False
    in_order: bool = False
    seed: int | None = None


class Walk(Verifier):
    """Verifies row by row and node by node; processors and criteria see what plain shows them."""

    name = "walk"

    def __init__(self, rules: Rules, emitter: Emitter, processes: Processes | None = None) -> None:
        super().__init__(processes)
        self.rules, self._emitter = rules, emitter
        self._noise: Noise | None = None
        self._likeliest: np.ndarray | None = None  # [rows, nodes] of a step

    def first(self, rows: Rows, logits: torch.Tensor) -> Verdict:
        if self.rules.do_sample and not self.rules.in_order:
            shape = rows.num_rows, logits.shape[-1]
            self._noise = Noise(*shape, self._emitter.device, seed=self.rules.seed)
        return super().first(rows, logits)

    def end(self, rows: Rows) -> None:
        processors, columns = self.rules.processors, self._emitter.num_shown(rows)
        if self._noise is not None:
            self._noise.finish(columns)
        if processors.keeps_state:
            ids = np.stack([rows.ids(row)[: rows.prompt_columns] for row in range(rows.num_rows)])
            shown = np.minimum(rows.num_text, columns - 1).tolist()
            texts = [rows.emitted(row)[:count].tolist() for row, count in enumerate(shown)]
            processors.end(torch.from_numpy(ids).to(self._emitter.device), texts)

    def feed_pad(self, rows: Rows, row: int, logits: torch.Tensor) -> None:
        if self._emitter.keeps_choices:
            self.score(rows, row, logits)
        self._emitter.feed_pad(rows, row)

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        # One launch and one copy on an accelerator. On a CPU it is faster to look only at the nodes
        # that the walk reaches.
        at_once = self._choices_are_free and logits.device.type != "cpu"
        self._likeliest = logits.argmax(-1).cpu().numpy() if at_once else None
        return self._walk(rows, lambda row: self._decider(rows, row, draft, logits))

    def _walk(self, rows: Rows, decider: Callable[[int], Decide]) -> Verdict:
        """Walk down the tree of every live row, each by its own function."""
        live = rows.live
        tokens: list[list[int]] = [[] for _ in range(rows.num_rows)]
        paths: list[list[int]] = [[] for _ in range(rows.num_rows)]
        for row in np.flatnonzero(live).tolist():
            self._walk_row(rows, row, decider(row), tokens[row], paths[row])
        return Verdict.from_rows(tokens, paths, live, rows.finished.copy())

    @property
    def _choices_are_free(self) -> bool:
        """Whether the likeliest token is chosen, and the scores are not asked for."""
        rules, keeps = self.rules, self._emitter.keeps_choices
        return not (rules.do_sample or keeps) and rules.processors.empty

    def _walk_row(
        self, rows: Rows, row: int, decide: Decide, tokens: list[int], path: list[int]
    ) -> None:
        """Append the tokens that a row emits to `tokens`, and its accepted nodes to `path`."""
        while True:
            token, child = decide(path[-1] if path else ROOT)
            tokens.append(token)
            stops = self._emit(rows, row, token)
            tokens[-1] = rows.last_token(row)
            if stops or child is None or tokens[-1] != token:  # A criterion may have edited it.
                return
            path.append(child)

    def _emit(self, rows: Rows, row: int, token: int) -> bool:
        """Append a token to a row, and return whether the text ends with it."""
        return self._emitter.emit(rows, row, token)

    def _decider(self, rows: Rows, row: int, draft: DraftTree, logits: torch.Tensor) -> Decide:
        """Return a function that chooses the token after a node of the row and finds its child."""
        known = self._likeliest

        def decide(node: int) -> tuple[int, int | None]:
            at = row, node + 1
            token = self._choose(rows, row, logits[at]) if known is None else int(known[at])
            return token, draft.child_of(row, node, token)

        return decide

    def _choose(self, rows: Rows, row: int, logits: torch.Tensor) -> int:
        """Return the token that plain `generate` chooses after logits, [vocab]."""
        rules = self.rules
        if self._choices_are_free:
            return argmax(logits)
        scores = self.score(rows, row, logits)
        if not rules.do_sample:
            return argmax(scores[0])
        probs = scores.softmax(-1)
        if self._noise is None:
            return int(torch.multinomial(probs, 1))
        return self._noise.pick(probs, [row], rows.num_emitted[[row]])[0]

    def score(self, rows: Rows, row: int, logits: torch.Tensor) -> torch.Tensor:
        """Return the processed scores after logits, [1, vocab] float32; keep them if requested."""
        processors, emitter = self.rules.processors, self._emitter
        raw = logits[None].to(copy=True, dtype=torch.float32, device=emitter.device)
        scores = raw
        if not processors.empty:
            ids = emitter.ids(rows, row)
            scores = processors(row, ids, raw)
            if not processors.all_known:
                rows.rewrite(row, ids[0])
        emitter.choose(row, scores[0], raw[0])
        return scores


def along(
    walked: np.ndarray,  # [2 + width] integers
    drafted: np.ndarray,  # [nodes] integers
    is_distribution: np.ndarray | None,  # [width]
) -> Decide:
    """Return a function that follows the path of a row that was walked on the device.

    Args:
        walked: The row's `TreeWalk.packed`.
        drafted: Token of each node.
        is_distribution: Whether the probabilities after the last token and after each node are
            finite; None if the tokens were not chosen by probabilities.
    """
    accepted, bonus = int(walked[0]), int(walked[1])
    after = dict(pairwise((walked[2 : 3 + accepted] - 1).tolist()))

    def decide(node: int) -> tuple[int, int | None]:
        refuse_unless(is_distribution is None or bool(is_distribution[node + 1]))
        child = after.get(node)
        return (bonus, None) if child is None else (int(drafted[child]), child)

    return decide
