"""The loop: draft, launch, verify, commit, observe."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lookahead_hf.generation.assembly import assemble
from lookahead_hf.generation.call import PreparedCall
from lookahead_hf.runner import attention, implicit_positions
from lookahead_hf.runner.recurrent import layers as recurrent


def decode(call: PreparedCall) -> Any:
    """Generate as plain `generate` would from what it prepared, with drafts.

    Returns:
        What `generate` returns.

    Raises:
        Unserved: This call cannot be speculated; nothing was emitted.
        ValueError: An option, a pool or a prediction is wrong.
    """
    session = assemble(call)
    rows, timed = session.rows, session.stats.timed
    drafts = timed(session.drafts, begin="draft", propose="draft", prepare="draft")
    runner = timed(session.runner, launch="forward", commit="commit")
    verifier = timed(session.verifier, first="verify", read="verify")
    attends, counts = attention.laid_under(call.model), implicit_positions.laid_under(call.model)
    states = recurrent.laid_under(call.model)
    # Entered twice, since an interrupt may fall just where the inner one is left.
    with attends, counts, states, attends, counts, states, ExitStack() as stack:
        stack.enter_context(session)
        verifier.first(rows, session.prefill(stack))
        drafts.begin(rows)
        session.observe_prefill()
        while rows.live.any():
            draft = drafts.propose(rows)
            step = runner.launch(rows, draft)
            drafts.prepare(step)
            draft, step = session.repeat_if_not_finite(draft, step)
            verdict = verifier.read(rows, draft, step)
            num_moved = runner.commit(verdict)
            session.observe(draft, step, verdict, num_moved)
        return session.output()
