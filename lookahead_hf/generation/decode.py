"""The loop: draft, launch, verify, commit, observe."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lookahead_hf.generation.assembly import assemble
from lookahead_hf.generation.call import PreparedCall
from lookahead_hf.generation.session import Session
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
    return run(assemble(call))


def run(session: Session) -> Any:
    """Decode the texts of a session until it has no more of them.

    Returns:
        The output of the session.
    """
    rows, timed = session.rows, session.stats.timed
    drafts = timed(session.drafts, propose="draft", prepare="draft")
    runner = timed(session.runner, launch="forward", commit="commit")
    verifier = timed(session.verifier, read="verify")
    model = session.runner.model
    attends, counts = attention.laid_under(model), implicit_positions.laid_under(model)
    states = recurrent.laid_under(model)
    # Entered twice, since an interrupt may fall just where the inner one is left.
    with attends, counts, states, attends, counts, states, ExitStack() as stack:
        stack.enter_context(session)
        session.start(stack)
        while session.goes_on():
            draft = drafts.propose(rows)
            step = runner.launch(rows, draft)
            drafts.prepare(step)
            draft, step = session.repeat_if_not_finite(draft, step)
            verdict = verifier.read(rows, draft, step)
            num_moved = runner.commit(verdict)
            session.observe(draft, step, verdict, num_moved)
        return session.output()
