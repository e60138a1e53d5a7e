"""The walk of all rows together, for devices where a launch costs more than a row."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.rows import Rows
from lookahead_hf.verification.walk import Walk, reads_wait


def pays(device: torch.device, num_rows: int) -> bool:
    """Return whether processing rows together is faster than one by one."""
    return reads_wait(device) and num_rows > 1


class BatchedWalk(Walk):
    """Walks all rows together, node by node.

    Processors that look at scores alone are called once for all rows that go on, padded to as many
    rows as plain's batch has, so that they round as in plain generation.
    """

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        if self.rules.takes_likeliest:
            return super().verify(rows, draft, logits)
        live = rows.live
        tokens: list[list[int]] = [[] for _ in range(rows.num_rows)]
        paths: list[list[int]] = [[] for _ in range(rows.num_rows)]
        going = np.flatnonzero(live).tolist()
        while going:
            nodes = [paths[row][-1] + 1 if paths[row] else 0 for row in going]
            at = torch.tensor([going, nodes], device=logits.device)
            chosen = self._choose_each(rows, going, logits[at[0], at[1]])
            on_path = []
            for row, node, token in zip(going, nodes, chosen, strict=True):
                tokens[row].append(token)
                child = draft.child_of(row, node - 1, token)
                if not self._emit(rows, row, token) and child is not None:
                    paths[row].append(child)
                    on_path.append(row)
            going = on_path
        return Verdict.from_rows(tokens, paths, live, rows.finished.copy())

    def _choose_each(self, rows: Rows, going: list[int], logits: torch.Tensor) -> list[int]:
        """Return the tokens that plain would choose after logits, [rows that go on, vocab]."""
        emitter, noise = self.rules.emitter, self.rules.noise
        raw = logits.to(copy=True, dtype=torch.float32, device=emitter.device)
        scores = self.rules.processors.of_rows(going, lambda row: emitter.ids(rows, row), raw)
        for row, chosen_by, given in zip(going, scores, raw, strict=True):
            emitter.choose(row, chosen_by, given)
        if not self.rules.do_sample:
            return scores.argmax(-1).tolist()
        assert noise is not None
        return noise.pick(scores.softmax(-1), going, rows.num_emitted[going])
