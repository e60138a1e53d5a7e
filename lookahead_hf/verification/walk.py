"""The walk: at a node score, choose, emit, ask whether the text stops, then step to the child."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from lookahead_hf.draft import ROOT, DraftTree, Verdict
from lookahead_hf.generation.outputs import Records
from lookahead_hf.generation.streaming import ColumnStream
from lookahead_hf.logits.row_processors import RowProcessors
from lookahead_hf.rows import Rows
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
        stream: Gets every token once the criteria were asked about it, as plain's streamer does.
    """

    processors: RowProcessors
    stopping: RowStopping
    noise: Noise | NoiseInOrder | None
    records: Records
    device: torch.device
    stream: ColumnStream = ColumnStream(None, 0, None)  # which nobody hears


class Walk:
    """Verifies node by node: processors and criteria see what plain `generate` shows them.

    Attributes:
        so_far: What stands of a step that broke off; None outside of steps.
    """

    name = "walk"

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._live = np.zeros(0, bool)
        self._paths: list[list[int]] | None = None  # of the step in progress

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        """Decide one step and emit its tokens.

        Args:
            rows: The texts; the emitted tokens are appended and finished rows marked.
            draft: What was fed behind the last tokens.
            logits: The target's, [rows, 1 + most nodes, vocab].
        """
        live = rows.live
        tokens: list[list[int]] = [[] for _ in range(rows.num_rows)]
        paths: list[list[int]] = [[] for _ in range(rows.num_rows)]
        self._live, self._paths = live, paths
        choices = self._choices(logits)
        for row in np.flatnonzero(live).tolist():
            decide = self._decider(rows, row, draft, logits, choices)
            self._walk_row(rows, row, decide, tokens[row], paths[row])
        self._paths = None
        return verdict_of(tokens, paths, live, rows.finished.copy())

    @property
    def so_far(self) -> Verdict | None:
        if self._paths is None:
            return None
        # As if the token after every path were chosen: the cache holds what it would follow.
        chosen = [
            [0] * (1 + len(path)) if is_live else []
            for path, is_live in zip(self._paths, self._live, strict=True)
        ]
        return verdict_of(chosen, self._paths, self._live, ~self._live)

    def _choices(self, logits: torch.Tensor) -> np.ndarray | None:
        """Every node's likeliest token where nothing alters the logits, [rows, nodes].

        On an accelerator that is one launch and one copy; on a CPU only the nodes that the walk
        reaches are worth a pass over the vocabulary.
        """
        free = self._choices_are_free and logits.device.type != "cpu"
        return logits.argmax(-1).cpu().numpy() if free else None

    @property
    def _choices_are_free(self) -> bool:
        """Whether the likeliest token is chosen, and nobody asked by what."""
        rules = self.rules
        return rules.noise is None and rules.processors.empty and not rules.records.chooses

    def _walk_row(
        self, rows: Rows, row: int, decide: Decide, tokens: list[int], path: list[int]
    ) -> None:
        """Append what a row emits to `tokens`, and the nodes that it walks down to `path`."""
        while True:
            token, child = decide(path[-1] if path else ROOT)
            tokens.append(token)
            stops = self._emit(rows, row, token)
            tokens[-1] = rows.last_token(row)
            if stops or child is None or tokens[-1] != token:  # A criterion may have edited it.
                return
            path.append(child)

    def _emit(self, rows: Rows, row: int, token: int) -> bool:
        """Append a token to a row, let it be seen, and say whether the text ends with it."""
        rows.emit(row, token)
        stops = self._stops(rows, row, token)
        if stops:
            rows.end(row)
        self.rules.stream.push(row, token, stops)
        return stops

    def _decider(
        self,
        rows: Rows,
        row: int,
        draft: DraftTree,
        logits: torch.Tensor,
        choices: np.ndarray | None,
    ) -> Decide:
        """What chooses the token after a node of the row, and finds the child that holds it."""

        def decide(node: int) -> tuple[int, int | None]:
            token = (
                self._choose(rows, row, logits[row, node + 1])
                if choices is None
                else int(choices[row, node + 1])
            )
            return token, child_of(draft, row, node, token)

        return decide

    def _choose(self, rows: Rows, row: int, logits: torch.Tensor) -> int:
        """The token that plain `generate` would choose after these logits, [vocab]."""
        rules = self.rules
        if self._choices_are_free:
            return _argmax(logits)
        scores = self.score(rows, row, logits)
        if rules.noise is None:
            return _argmax(scores[0])
        return rules.noise.pick(scores.softmax(-1), row, int(rows.num_emitted[row]))

    def score(self, rows: Rows, row: int, logits: torch.Tensor) -> torch.Tensor:
        """The processed scores after these logits, [1, vocab] float32, recorded where asked for."""
        rules = self.rules
        raw = logits[None].to(copy=True, dtype=torch.float32, device=rules.device)
        scores = raw
        if not rules.processors.empty:
            ids = self._ids(rows, row)
            scores = rules.processors(row, ids, raw)
            if not rules.processors.all_known:
                rows.rewrite(row, ids[0])
        rules.records.choose(row, scores[0], raw[0])
        return scores

    def _stops(self, rows: Rows, row: int, token: int) -> bool:
        stopping, columns = self.rules.stopping, len(rows.ids(row))
        scores = self.rules.records.scores_so_far
        if stopping.all_known:
            return stopping.stops(row, token, columns, lambda: self._ids(rows, row), scores)
        ids = self._ids(rows, row)
        stops = stopping.stops(row, token, columns, lambda: ids, scores)
        rows.rewrite(row, ids[0])
        return stops

    def _ids(self, rows: Rows, row: int) -> torch.Tensor:
        """The row's own prefix as plain holds it, [1, columns]."""
        return torch.from_numpy(rows.ids(row))[None].to(self.rules.device)


def child_of(draft: DraftTree, row: int, node: int, token: int) -> int | None:
    """The drafted child of a row's node that holds the token, None where there is none."""
    nodes = draft.row(row)
    found = np.flatnonzero((draft.parents[nodes] == node) & (draft.token_ids[nodes] == token))
    return int(found[0]) if len(found) else None


def verdict_of(
    tokens: list[list[int]], paths: list[list[int]], live: np.ndarray, finished: np.ndarray
) -> Verdict:
    """The verdict on a step from each row's tokens and accepted nodes."""
    return Verdict(
        _offsets(tokens),
        np.array([token for row in tokens for token in row], np.int64),
        _offsets(paths),
        np.array([node for row in paths for node in row], np.int32),
        live,
        finished,
    )


def _offsets(rows: list[list[int]]) -> np.ndarray:
    return np.cumsum([0, *map(len, rows)], dtype=np.int64)


def _argmax(scores: torch.Tensor) -> int:
    """Index of the largest entry of `[vocab]`, the first of several, as `torch.argmax`.

    numpy's loop over 49,152 entries takes 5 us on a CPU, torch's 60 us in fp32 and 180 us in bf16.
    """
    if scores.device.type == "cpu":
        return int(scores.float().numpy().argmax())
    return int(scores.argmax())
