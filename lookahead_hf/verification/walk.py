"""The walk: at a node score, choose, emit, ask whether the text stops, then step to the child."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from lookahead_hf.logits.walkers import RowProcessors
from lookahead_hf.records import Records
from lookahead_hf.rows import Rows
from lookahead_hf.steps import ROOT, DraftTree, Verdict
from lookahead_hf.verification.noise import Noise, NoiseInOrder
from lookahead_hf.verification.stopping import RowStopping

Decide = Callable[[int], tuple[int, int | None]]
"""A node to the token after it and the child that holds that token, None if none does."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How this call chooses tokens and when its texts end.

    Attributes:
        processors: Logits processors and warpers, applied to a node with its own prefix.
        stopping: Stopping criteria, asked after every token.
        noise: The noise that plain sampling draws; None chooses the likeliest token.
        records: What the caller asked to see of each choice.
        device: Where processors and criteria expect their tensors.
    """

    processors: RowProcessors
    stopping: RowStopping
    noise: Noise | NoiseInOrder | None
    records: Records
    device: torch.device


class Walk:
    """Verifies node by node: processors and criteria see what plain `generate` shows them."""

    name = "walk"

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        """Decide one step and emit its tokens.

        Args:
            rows: The texts; the emitted tokens are appended and finished rows marked.
            draft: What was fed behind the last tokens.
            logits: The target's, [rows, 1 + most nodes, vocab].
        """
        live = rows.live
        choices = self._choices(logits)
        tokens: list[list[int]] = [[] for _ in range(rows.num_rows)]
        paths: list[list[int]] = [[] for _ in range(rows.num_rows)]
        for row in np.flatnonzero(live).tolist():
            tokens[row], paths[row] = self._walk_row(rows, row, draft, logits, choices)
        return Verdict(
            _offsets(tokens),
            np.array([t for row in tokens for t in row], np.int64),
            _offsets(paths),
            np.array([n for row in paths for n in row], np.int32),
            live,
            rows.finished.copy(),
        )

    def _choices(self, logits: torch.Tensor) -> np.ndarray | None:
        """Every node's likeliest token where nothing alters the logits, [rows, nodes].

        On an accelerator that is one launch and one copy; on a CPU only the nodes that the walk
        reaches are worth a pass over the vocabulary.
        """
        rules = self.rules
        altered = rules.noise is not None or not rules.processors.empty or rules.records.chooses
        return None if altered or logits.device.type == "cpu" else logits.argmax(-1).cpu().numpy()

    def _walk_row(
        self,
        rows: Rows,
        row: int,
        draft: DraftTree,
        logits: torch.Tensor,
        choices: np.ndarray | None,
    ) -> tuple[list[int], list[int]]:
        decide = self._decider(rows, row, draft, logits, choices)
        tokens: list[int] = []
        path: list[int] = []
        node = ROOT
        while True:
            token, child = decide(node)
            rows.emit(row, token)
            tokens.append(token)
            if self._stops(rows, row, token):
                rows.end(row)
                return tokens, path
            if child is None:
                return tokens, path
            node = child
            path.append(node)

    def _decider(
        self,
        rows: Rows,
        row: int,
        draft: DraftTree,
        logits: torch.Tensor,
        choices: np.ndarray | None,
    ) -> Decide:
        """What chooses the token after a node of the row, and finds the child that holds it."""
        nodes = draft.row(row)
        parents, drafted = draft.parents[nodes], draft.token_ids[nodes]

        def decide(node: int) -> tuple[int, int | None]:
            token = (
                self._choose(rows, row, logits[row, node + 1])
                if choices is None
                else int(choices[row, node + 1])
            )
            child = np.flatnonzero((parents == node) & (drafted == token))
            return token, int(child[0]) if len(child) else None

        return decide

    def _choose(self, rows: Rows, row: int, logits: torch.Tensor) -> int:
        """The token that plain `generate` would choose after these logits, [vocab]."""
        rules = self.rules
        if rules.processors.empty and rules.noise is None and not rules.records.chooses:
            return _argmax(logits)
        scores = self.score(rows, row, logits)
        if rules.noise is None:
            return _argmax(scores[0])
        return rules.noise.pick(scores.softmax(-1), row, int(rows.num_emitted[row]))

    def score(self, rows: Rows, row: int, logits: torch.Tensor) -> torch.Tensor:
        """The processed scores after these logits, [1, vocab] float32, recorded where asked for."""
        rules = self.rules
        raw = logits[None].to(copy=True, dtype=torch.float32, device=rules.device)
        empty = rules.processors.empty
        scores = raw if empty else rules.processors(row, self._ids(rows, row), raw)
        rules.records.choose(row, scores[0], raw[0])
        return scores

    def _stops(self, rows: Rows, row: int, token: int) -> bool:
        stops, columns = self.rules.stopping.stops, len(rows.ids(row))
        scores = self.rules.records.scores_so_far
        return stops(row, token, columns, lambda: self._ids(rows, row), scores)

    def _ids(self, rows: Rows, row: int) -> torch.Tensor:
        """The row's own prefix as plain holds it, [1, columns]."""
        return torch.from_numpy(rows.ids(row))[None].to(self.rules.device)


def _offsets(rows: list[list[int]]) -> np.ndarray:
    return np.cumsum([0, *map(len, rows)], dtype=np.int64)


def _argmax(scores: torch.Tensor) -> int:
    """Index of the largest entry of `[vocab]`, the first of several, as `torch.argmax`.

    numpy's loop over 49,152 entries takes 5 us on a CPU, torch's 60 us in fp32 and 180 us in bf16.
    """
    if scores.device.type == "cpu":
        return int(scores.float().numpy().argmax())
    return int(scores.argmax())
