"""Chooses the rules and the verifier of a call."""

from __future__ import annotations

from lookahead_hf.call.emitter import Emitter
from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.distributed.coordinator import Processes
from lookahead_hf.logits.row_processors import RowProcessors
from lookahead_hf.support import checks
from lookahead_hf.verification import batched_walk, device, node_processors
from lookahead_hf.verification.batched_walk import BatchedWalk
from lookahead_hf.verification.device import Device
from lookahead_hf.verification.follower import FollowerLockstep, FollowerWalk
from lookahead_hf.verification.generators import OwnGenerators
from lookahead_hf.verification.lockstep import Lockstep
from lookahead_hf.verification.rejection import Rejection
from lookahead_hf.verification.rng import same_as_multinomial
from lookahead_hf.verification.verifier import Verifier
from lookahead_hf.verification.walk import Rules, Walk


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
    if on_device and device.serves(where) and checks.on_device(call.model, where):
        return Device(rules)
    if processes.receive is not None:
        return FollowerWalk(rules, processes)
    walk = BatchedWalk if batched_walk.pays(where, call.num_rows) else Walk
    return walk(rules, processes)
