"""Builds the parts of one decoded call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lookahead_hf import ngram_pool
from lookahead_hf.block.layout import BlockShape
from lookahead_hf.call import admission
from lookahead_hf.call.emitter import build_emitter
from lookahead_hf.call.outputs import RequestedOutputs
from lookahead_hf.call.prepared import PreparedCall, Request
from lookahead_hf.call.streaming import ColumnStream
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.drafting.registry import build
from lookahead_hf.drafting.session import INVARIANT_WIDTH, DraftSession, Limits
from lookahead_hf.generation.recorder import StatsRecorder, Tracer
from lookahead_hf.generation.session import BatchSession
from lookahead_hf.logits.constraints import find_constraint
from lookahead_hf.model import compat, limits, self_test
from lookahead_hf.ngram_pool import compilation
from lookahead_hf.rows import rows_of
from lookahead_hf.runner import engines
from lookahead_hf.runner.engines import StepOptions
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.processes import Processes, coordinator
from lookahead_hf.verification import select
from lookahead_hf.verification.lockstep import Lockstep
from lookahead_hf.verification.select import DEVICE, choose_verifier
from lookahead_hf.verification.walk import Verifier

if TYPE_CHECKING:
    from lookahead_hf.logits.grammars import Grammar
    from lookahead_hf.rows import EncoderInputs


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
    limits.check_length(call)
    shape = _block_shape(call)

    stats = StatsRecorder(call.num_rows)
    rows = rows_of(call.input_ids, call.attended, encoder_inputs)
    outputs = RequestedOutputs(
        call.generation_config, call.num_rows, call.model_kwargs.get("encoder_outputs")
    )
    stream = ColumnStream(request.streamer, call.num_rows, call.pad, stats.leave_out_streaming)
    verifier = choose_verifier(call, build_emitter(call, outputs, stream), processes)

    def takes_flat(reads_prompts: bool) -> bool:
        may_be_flat = (call.num_rows > 1 or reads_prompts) and processes.is_alone
        may_be_flat &= shape is None and not outputs.observes
        may_be_flat &= not isinstance(verifier, Lockstep)  # which shows finished rows to processors
        return may_be_flat and admission.takes_flat(call)

    runner = _runner(call, shape, verifier, processes, outputs, takes_flat)
    drafts = DraftSession(
        model,
        request.config,
        rows,
        drafters,
        Limits(
            call.do_sample,
            int(compat.text_config(model).vocab_size),
            call.num_draftable,
            chains=runner.only_chains or (shape is not None and not shape.by_kernel),
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

    Raises:
        ValueError: An option, a pool or a prediction is wrong.
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


def _block_shape(call: PreparedCall) -> BlockShape | None:
    """Return the shape of all blocks with `draft_invariant`, else None."""
    if not call.request.config.draft_invariant:
        return None
    # The kernel has no attention weights to return.
    by_kernel = not call.model_kwargs.get("output_attentions")
    by_kernel = by_kernel and self_test.keeps_bits_in_trees(call.model, INVARIANT_WIDTH)
    return BlockShape(INVARIANT_WIDTH, call.num_new + INVARIANT_WIDTH, by_kernel)


def _runner(
    call: PreparedCall,
    shape: BlockShape | None,
    verifier: Verifier,
    processes: Processes,
    outputs: RequestedOutputs,
    takes_flat: Callable[[bool], bool],
) -> Runner:
    """Return the runner of a call. On a device, every engine has its forwards captured."""
    options = StepOptions(
        call.model,
        call.num_rows,
        call.num_new,
        takes_flat,
        shape,
        call.request.config.compiled_layers,
        call.request.config.cuda_graphs,
        is_alone=processes.is_alone,
        observes=bool(outputs.observes),
        decides=verifier.name == DEVICE,
        scoring=select.scoring(verifier),
    )
    return engines.choose(select.engine_of(call.input_ids.device), options)
