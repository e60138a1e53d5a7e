"""Chooses the verifier of a call."""

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
from lookahead_hf.verification.lockstep import Lockstep
from lookahead_hf.verification.rejection import Rejection
from lookahead_hf.verification.rng import same_as_multinomial
from lookahead_hf.verification.verifier import Verifier
from lookahead_hf.verification.walk import Rules, Walk


def choose_verifier(
    call: PreparedCall, emitter: Emitter, processes: Processes, seed: int | None = None
) -> Verifier:
    """Choose the verifier of a call: row by row if processors and criteria allow it, else lockstep.

    Args:
        call: The call.
        emitter: Emits the tokens.
        processes: Who decides if several processes run the model.
        seed: The seed of a request in a queue, which is verified on the host; None for the noise of
            the default generator.
    """
    where, stopping = call.input_ids.device, emitter.stopping
    processors = RowProcessors(call.processors, call.num_rows)
    # An unknown class may draw random numbers. Then every draw keeps plain's order.
    is_known = processors.all_known and stopping.all_known
    is_replayed = not call.do_sample or same_as_multinomial(where)
    in_order = call.num_rows == 1 and not (is_known and is_replayed)
    by_row = not (processors.unserved() or stopping.unserved())
    by_row &= not (emitter.is_heard and processors.keeps_state)  # a streamer may look at it
    if not by_row or not (is_replayed or call.num_rows == 1):
        kind = Lockstep if processes.receive is None else FollowerLockstep
        return kind(call, emitter, processes)

    draws = call.request.draws(call.do_sample)
    rules = Rules(processors, call.do_sample, in_order or draws, seed)
    if draws:
        return Rejection(rules, emitter, processes)
    on_device = is_replayed and not in_order and not emitter.keeps_outputs
    on_device = on_device and seed is None and processes.is_alone
    on_device = on_device and node_processors.admits(processors)
    if on_device and device.serves(where) and checks.on_device(call.model, call.input_ids):
        return Device(rules, emitter)
    if processes.receive is not None:
        return FollowerWalk(rules, emitter, processes)
    walk = BatchedWalk if batched_walk.pays(where, call.num_rows) else Walk
    return walk(rules, emitter, processes)
