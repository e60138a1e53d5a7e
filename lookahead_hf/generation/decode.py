"""The loop: draft, lay out, forward, verify, commit, observe."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from lookahead_hf.generation.call import Call
from lookahead_hf.generation.request import Request
from lookahead_hf.runner import attention, implicit_positions


def decode(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    request: Request,
) -> Any:
    """Generate as plain `generate` would from what it prepared, with drafts.

    Args:
        model: The target.
        input_ids: Prompt tokens, [rows, columns].
        logits_processor: As prepared by `generate`.
        stopping_criteria: As prepared by `generate`.
        generation_config: As prepared by `generate`.
        model_kwargs: As prepared by `generate`.
        request: What the caller asked for.

    Returns:
        What `generate` returns.

    Raises:
        Unserved: This call cannot be speculated; nothing was emitted.
    """
    call = Call(
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        model_kwargs,
        request,
    )
    rows, target, drafts, engine = call.rows, call.target, call.drafts, call.engine
    phase = call.record.phase
    attends, counts = attention.laid_under(model), implicit_positions.laid_under(model)
    # Twice, since an interrupt may fall just where the inner one is left.
    with attends, counts, attends, counts, ExitStack() as stack:
        stack.enter_context(attention.left_to_kernel(call.by_kernel))
        stack.enter_context(call)
        logits = call.prefill(stack)
        call.processes.step()
        stack.enter_context(engine.sampling(rows, logits))
        engine.first(rows, logits)
        with phase("draft"):
            call.begin_drafts()
        while rows.live.any():
            with phase("draft"):
                draft = engine.complete(rows, call.propose())
            with phase("commit"):
                inputs = target.layout(rows, draft)
            with phase("forward"):
                call.processes.step()
                outputs = target.forward(inputs)
            with phase("draft"):
                drafts.prepare(outputs)
            draft, outputs = call.unspoiled(draft, outputs)
            verdict = call.verify(draft, outputs)
            call.observe(verdict, outputs)
            with phase("commit"):
                num_moved = target.commit(verdict)
            call.record.observe(draft, verdict, num_moved)
            with phase("draft"):
                drafts.observe(rows, draft, verdict, outputs.logits, call.record.step_seconds)
        return call.output()
