"""A decoded call: its parts, and the loop: draft, launch, verify, commit, observe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from lookahead_hf import ngram_pool
from lookahead_hf.block.layout import BlockShape
from lookahead_hf.call import admission
from lookahead_hf.call.emitter import ColumnStream, RequestedOutputs, build_emitter
from lookahead_hf.call.prepared import PreparedCall, Request
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.drafting.registry import build
from lookahead_hf.drafting.session import INVARIANT_WIDTH, DraftSession, Limits
from lookahead_hf.fallback import FallbackReason, Unserved
from lookahead_hf.generation.recorder import StatsRecorder, Tracer
from lookahead_hf.generation.session import BatchSession, Session
from lookahead_hf.logits.constraints import find_constraint
from lookahead_hf.logits.grammars import Grammar
from lookahead_hf.model import compat
from lookahead_hf.model.facts import facts_of
from lookahead_hf.ngram_pool import compilation
from lookahead_hf.rows import EncoderInputs, rows_of
from lookahead_hf.runner.host import StepOptions, choose
from lookahead_hf.runner.patched import patched
from lookahead_hf.runner.processes import Processes, coordinator
from lookahead_hf.verification import select
from lookahead_hf.verification.select import DEVICE, choose_verifier
from lookahead_hf.verification.walk import Lockstep


def assemble(call: PreparedCall) -> BatchSession:
    """Build the parts of a call; nothing is emitted, and the prompt is not read.

    Raises:
        Unserved: The call cannot be speculated.
        ValueError: An option, a pool or a prediction is wrong.
    """
    model, request, encoder_inputs = call.model, call.request, call.encoder_inputs
    several = coordinator(model, request.synced_gpus)
    processes: Processes = (
        Processes()
        if several is None
        else several.processes_for(
            model,
            call.input_ids.device,
            synced=request.synced_gpus,
            draws=request.draws(call.do_sample),
            assistant=request.assistant_model,
        )
    )
    constraint = find_constraint(call.processors, call.num_rows)
    drafters = build_drafters(
        model,
        request,
        call.num_rows,
        call.do_sample,
        encoder_inputs,
        call.processors,
        None if constraint is None else constraint.shadow,
    )
    admission.admit_call(call)
    admission.warn_of_rounding(model)
    shape = None
    if request.config.draft_invariant:
        shape = BlockShape(INVARIANT_WIDTH, call.num_new + INVARIANT_WIDTH)

    stats = StatsRecorder(call.num_rows)
    rows = rows_of(call.input_ids, call.attended, encoder_inputs)
    outputs = RequestedOutputs(
        call.generation_config, call.num_rows, call.model_kwargs.get("encoder_outputs")
    )
    stream = ColumnStream(request.streamer, call.num_rows, call.pad, stats.leave_out_streaming)
    verifier = choose_verifier(call, build_emitter(call, outputs, stream), processes)

    def takes_packed(reads_prompts: bool) -> bool:
        may_be_packed = (call.num_rows > 1 or reads_prompts) and processes.is_alone
        may_be_packed &= shape is None and not outputs.observes
        may_be_packed &= not isinstance(verifier, Lockstep)  # it shows finished rows to processors
        return may_be_packed and admission.takes_packed(call)

    options = StepOptions(
        model,
        call.num_rows,
        call.num_new,
        takes_packed,
        shape,
        request.config.compiled_layers,
        request.config.cuda_graphs,
        is_alone=processes.is_alone,
        observes=outputs.observes,
        decides=verifier.name == DEVICE,
        scoring=select.scoring(verifier),
    )
    runner = choose(select.engine_of(call.input_ids.device), options)
    drafts = DraftSession(
        model,
        request.config,
        rows,
        drafters,
        Limits(
            call.do_sample,
            int(compat.text_config(model).vocab_size),
            call.num_draftable,
            chains=runner.only_chains or shape is not None,
        ),
        runner,
        processes,
        verifier.complete,
    )
    return BatchSession(
        call=call,
        rows=rows,
        drafts=drafts,
        runner=runner,
        verifier=verifier,
        processes=processes,
        stream=stream,
        outputs=outputs,
        stats=stats,
        tracer=Tracer(stats.milliseconds) if request.config.trace else None,
    )


def build_drafters(
    model: Any,
    request: Request,
    num_rows: int | None,
    do_sample: bool,
    encoder_inputs: EncoderInputs | None = None,
    processors: Sequence[Any] = (),
    grammar_of: Callable[[int], Grammar | None] | None = None,
) -> list[Drafter]:
    """Build the drafters of a call, which costs little; `num_rows` is None if it is not known.

    ValueError if an option, a pool or a prediction is wrong.
    """
    predictions = request.prediction
    if predictions is not None and (not predictions or (num_rows or 0) % len(predictions)):
        raise ValueError(
            f"prediction holds {len(predictions)} texts, but the batch has {num_rows or 0} rows: "
            "give one for every row (an empty list where there is none), or a single one for all"
        )
    try:
        return build(
            request,
            model,
            vocab_size=int(compat.text_config(model).vocab_size),
            encoder_inputs=encoder_inputs,
            processors=processors,
            grammar_of=grammar_of,
            draws=request.draws(do_sample),
        )
    except ngram_pool.NumbaMissingError as error:
        compilation.warn_of(error)
        return []


def decode(call: PreparedCall) -> Any:
    """Decode a prepared call with drafts, and return what `generate` returns.

    Raises:
        Unserved: This call cannot be speculated; nothing was emitted.
        ValueError: An option, a pool or a prediction is wrong.
    """
    cache = call.cache
    # Where all layers keep a state, a cache does not say how long it is.
    may_restart = type(cache) is compat.DynamicCache and not facts_of(call.model).mixers
    may_restart = may_restart and not cache.get_seq_length()
    session = assemble(call)
    try:
        return run(session)
    except torch.OutOfMemoryError:
        # While the cache is taken over, it holds up to twice what plain's does.
        if not may_restart or session.rows.num_emitted.any() or not session.processes.is_alone:
            raise
        unserved = Unserved(FallbackReason.MEMORY)
    except Unserved as found:  # of the prompt, which the cache now holds
        if not may_restart:
            raise RuntimeError(str(found)) from found
        unserved = found
    cache.layers = compat.empty_cache(call.model).layers
    raise unserved


def run(session: Session) -> Any:
    """Decode all texts of a session and return its output."""
    rows, phase = session.rows, session.stats.phase
    propose = phase("draft")(session.drafts.propose)
    prepare = phase("draft")(session.drafts.prepare)
    launch, commit = phase("forward")(session.launch), phase("commit")(session.runner.commit)
    read = phase("verify")(session.verifier.read)
    with patched(session.runner.model), ExitStack() as stack:
        stack.enter_context(session)
        session.start(stack)
        while session.goes_on():
            draft, step = launch(propose(rows))
            prepare(step)
            draft, step = session.repeat_if_not_finite(draft, step)
            verdict = read(rows, draft, step)
            commit(verdict)
            session.observe(draft, step, verdict)
        return session.output()
