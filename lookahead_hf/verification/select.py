"""Chooses how a call is verified, and the engine that runs its steps."""

from __future__ import annotations

import torch

from lookahead_hf.call import admission, optional
from lookahead_hf.call.emitter import Emitter
from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.draft import DraftTree
from lookahead_hf.logits.row_processors import RowProcessors
from lookahead_hf.rows import Rows
from lookahead_hf.runner.outputs import Scores, Scoring
from lookahead_hf.runner.processes import Processes
from lookahead_hf.verification import node_processors
from lookahead_hf.verification.node_processors import NodeProcessors
from lookahead_hf.verification.noise import OwnGenerators, same_as_multinomial
from lookahead_hf.verification.rejection import rejecting
from lookahead_hf.verification.walk import Lockstep, Rules, Verifier, Walk, following, on_host

DEVICE = "device"  # The engine whose walks read the paths that the device has accepted


def serves(device: torch.device) -> bool:
    """Return whether calls are verified on the device; on a CPU that would gain nothing."""
    return device.type == "cuda" and optional.find("cuda") is not None


def engine_of(device: torch.device) -> str:
    """Return the name of the engine that runs steps on a device."""
    return "cuda" if serves(device) else device.type


def scoring(verifier: Verifier) -> Scoring | None:
    """Return what the device makes of logits; None if it decides nothing or by the likeliest."""
    if not isinstance(verifier, Walk) or verifier.name != DEVICE or verifier.rules.takes_likeliest:
        return None
    rules = verifier.rules
    processed = NodeProcessors(rules.processors)

    def scores(rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Scores:
        """Return the processed scores of a step from its logits, [rows, width, vocab]."""
        values = processed(rows, draft, logits.to(copy=True, dtype=torch.float32))
        if rules.noise is None:
            return Scores(values)
        probs = values.softmax(-1)
        noise = rules.noise.blocks(rows.num_emitted, int(draft.depth.max(initial=0)) + 1)
        return Scores(probs, noise, probs.amax(-1).isfinite().long())

    return scores


def rules_of(call: PreparedCall, emitter: Emitter, seed: int | None = None) -> Rules:
    """Return how the rows of a call get their tokens.

    `seed` is that of a request, which draws beside others; None for the default generator.
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
    """Choose a call's verifier: by rows if processors and criteria allow it, else lockstep."""
    where, rules = call.input_ids.device, rules_of(call, emitter)
    is_replayed = not call.do_sample or same_as_multinomial(where)
    by_row = not (rules.processors.unserved() or emitter.stopping.unserved())
    by_row &= not (emitter.is_heard and rules.processors.keeps_state)  # a streamer may look at it
    if not by_row or not (is_replayed or call.num_rows == 1):
        return Lockstep(call, emitter, processes)
    if call.request.draws(call.do_sample):
        return Walk(rules, processes, rejecting(rules), "rejection")
    on_device = is_replayed and not rules.in_order and not emitter.outputs
    on_device = on_device and processes.is_alone and node_processors.admits(rules.processors)
    if on_device and serves(where) and admission.on_device(call.model, where):
        return Walk(rules, name=DEVICE)
    decide = on_host if processes.receive is None else following(processes.receive)
    return Walk(rules, processes, decide)
