"""The loop: draft, launch, verify, commit, observe."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from lookahead_hf.call.admission import check_version
from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.fallback import FallbackReason, Unserved
from lookahead_hf.generation.assembly import assemble
from lookahead_hf.generation.session import Session
from lookahead_hf.model import compat
from lookahead_hf.model.facts import facts_of
from lookahead_hf.runner.patched import patched


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
    if unserved.reason is FallbackReason.MODEL:
        check_version()
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
