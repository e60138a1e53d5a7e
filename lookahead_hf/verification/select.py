"""Chooses how a call is verified; walks that take all rows at once."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.call import admission, optional
from lookahead_hf.call.emitter import Emitter
from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.logits.row_processors import RowProcessors
from lookahead_hf.rows import Rows
from lookahead_hf.runner.outputs import Scores, Scoring
from lookahead_hf.runner.processes import Processes
from lookahead_hf.verification import node_processors
from lookahead_hf.verification.lockstep import FollowerLockstep, FollowerWalk, Lockstep
from lookahead_hf.verification.node_processors import NodeProcessors
from lookahead_hf.verification.rejection import Rejection
from lookahead_hf.verification.rng import OwnGenerators, same_as_multinomial
from lookahead_hf.verification.verifier import Verifier
from lookahead_hf.verification.walk import Rules, Walk, reads_wait


def pays_batched(device: torch.device, num_rows: int) -> bool:
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


def serves(device: torch.device) -> bool:
    """Return whether calls are verified on the device; on a CPU that would gain nothing."""
    return device.type == "cuda" and optional.find("cuda") is not None


def engine_of(device: torch.device) -> str:
    """Return the name of the engine that runs steps on a device."""
    return "cuda" if serves(device) else device.type


class Device(BatchedWalk):
    """Reads the accepted paths from the device and emits them.

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
        """Return the processed scores of a step from its logits, [rows, width, vocab]."""
        scores, noise = logits.to(copy=True, dtype=torch.float32), self.rules.noise
        scores = self._processed(rows, draft, scores)
        if noise is None:
            return Scores(scores)
        probs = scores.softmax(-1)
        depths = int(draft.depth.max(initial=0)) + 1
        return Scores(
            probs, noise.blocks(rows.num_emitted, depths), probs.amax(-1).isfinite().long()
        )


def rules_of(call: PreparedCall, emitter: Emitter, seed: int | None = None) -> Rules:
    """Return how the rows of a call get their tokens.

    Args:
        call: The call.
        emitter: Emits the tokens.
        seed: The seed of a request, which draws beside others; None for the default generator.
    """
    where, processors = call.input_ids.device, RowProcessors(call.processors, call.num_rows)
    # An unknown class may draw random numbers. Then every draw keeps plain's order.
    is_known = processors.all_known and emitter.stopping.all_known
    is_replayed = not call.do_sample or same_as_multinomial(where)
    in_order = call.num_rows == 1 and not (is_known and is_replayed)
    generators = OwnGenerators(where, seed) if in_order and seed is not None else None
    in_order = in_order or call.request.draws(call.do_sample)
    return Rules(processors, emitter, call.do_sample, in_order, seed, generators)


def choose_verifier(call: PreparedCall, emitter: Emitter, processes: Processes) -> Verifier:
    """Choose the verifier of a call: row by row if processors and criteria allow it, else lockstep.

    Args:
        call: The call.
        emitter: Emits the tokens.
        processes: Who decides if several processes run the model.
    """
    where, rules = call.input_ids.device, rules_of(call, emitter)
    is_replayed = not call.do_sample or same_as_multinomial(where)
    by_row = not (rules.processors.unserved() or emitter.stopping.unserved())
    by_row &= not (emitter.is_heard and rules.processors.keeps_state)  # a streamer may look at it
    if not by_row or not (is_replayed or call.num_rows == 1):
        kind = Lockstep if processes.receive is None else FollowerLockstep
        return kind(call, emitter, processes)

    if call.request.draws(call.do_sample):
        return Rejection(rules, processes)
    on_device = is_replayed and not rules.in_order and not emitter.outputs
    on_device = on_device and processes.is_alone and node_processors.admits(rules.processors)
    if on_device and serves(where) and admission.on_device(call.model, where):
        return Device(rules)
    if processes.receive is not None:
        return FollowerWalk(rules, processes)
    walk = BatchedWalk if pays_batched(where, call.num_rows) else Walk
    return walk(rules, processes)
