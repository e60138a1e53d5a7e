"""Verification on the device: the walk is part of the step, and the host reads its outcome."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.rows import Rows
from lookahead_hf.runner.outputs import DeviceOutputs, Scores, Scoring
from lookahead_hf.verification.batched_walk import BatchedWalk
from lookahead_hf.verification.node_processors import NodeProcessors
from lookahead_hf.verification.noise import Noise
from lookahead_hf.verification.rng import refuse_unless
from lookahead_hf.verification.walk import Rules


def serves(device: torch.device) -> bool:
    """Return whether calls on a device are verified there; on a CPU that would gain nothing."""
    return device.type == "cuda"


class Device(BatchedWalk):
    """Reads the accepted paths from the device and decides where the texts end.

    The first token, which has no step, is chosen as in a batched walk.
    """

    name = "device"

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._processed = NodeProcessors(rules.processors)

    @property
    def scoring(self) -> Scoring | None:
        alters = self.rules.do_sample or not self.rules.processors.empty
        return self.scores if alters else None

    def scores(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Scores:
        """Return what the tokens of a step are chosen by, from its logits, [rows, width, vocab]."""
        scores = logits.to(copy=True, dtype=torch.float32)
        scores = self._processed(rows, draft, scores)
        if not self.rules.do_sample:
            return Scores(scores)
        assert isinstance(self._noise, Noise)
        probs = scores.softmax(-1)
        depths = int(draft.depth.max(initial=0)) + 1
        noise = self._noise.blocks(rows.num_emitted, depths)
        return Scores(probs, noise, probs.amax(-1).isfinite().long())

    def read(self, rows: Rows, draft: DraftTree, step: DeviceOutputs) -> Verdict:
        """Wait for a step on the device; see `Verifier.read`."""
        live, packed = rows.live, step.walk.take()
        accepted, path = np.where(live, packed[:, 0], 0), packed[:, 2:]
        if step.is_finite is not None:
            on_path = (np.arange(path.shape[1]) <= accepted[:, None]) & live[:, None]
            met = np.take_along_axis(step.is_finite.take(), np.maximum(path, 0), 1)
            refuse_unless(bool(met[on_path].all()))
        tokens = _tokens(rows.num_rows, draft, path, accepted, packed[:, 1])
        counts = np.where(live, accepted + 1, 0)
        columns = rows.prompt_columns + rows.num_emitted
        kept, ended = self.rules.stopping.cut(tokens, counts, columns)
        rows.emit_block(tokens, kept)
        self.rules.stopping.warn(int((columns + kept).max()))
        rows.end(ended)
        verdict = Verdict.from_rows(
            [of_row[:count].tolist() for of_row, count in zip(tokens, kept, strict=True)],
            [(nodes[1:count] - 1).tolist() for nodes, count in zip(path, kept, strict=True)],
            live,
            rows.finished.copy(),
        )
        if self.rules.stream.is_heard:
            self._stream(verdict)
        return verdict

    def _stream(self, verdict: Verdict) -> None:
        for row in np.flatnonzero(verdict.num_emitted).tolist():
            *tokens, last = verdict.emitted(row).tolist()
            for token in tokens:
                self.rules.stream.push(row, token)
            self.rules.stream.push(row, last, bool(verdict.finished[row]))


def _tokens(
    num_rows: int, draft: DraftTree, path: np.ndarray, accepted: np.ndarray, bonus: np.ndarray
) -> np.ndarray:
    """Accepted tokens and bonus token of every row, [rows, width]; the rest is undefined."""
    width = path.shape[1]
    drafted = draft.padded(width)[0]
    after = np.concatenate([path[:, 1:], np.zeros((num_rows, 1), np.int64)], 1)
    tokens = np.take_along_axis(drafted, np.maximum(after, 0), 1)
    tokens[np.arange(num_rows), accepted] = bonus
    return tokens
