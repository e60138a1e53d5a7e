"""No lock of ours is held while code of the caller runs, which may wait for another call.

One is: a request's own processors and criteria run while it has torch's default generators.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.model.state import state_of
from lookahead_hf.rows import Rows
from tests.helpers.compared import served
from tests.helpers.models import prompt, tiny
from tests.helpers.requests import WAIT, prompts, running, settings
from tests.helpers.scripted import chain

GENERATORS = "lookahead_hf.verification.rng._taken"

KINDS = {type(threading.Lock()), type(threading.RLock())}


class Watched:
    """A lock that knows which locks its thread holds."""

    on_thread = threading.local()

    def __init__(self, lock: Any, name: str) -> None:
        self._lock, self._name = lock, name

    @classmethod
    def held(cls) -> list[str]:
        """Names of the locks that this thread holds."""
        if not hasattr(cls.on_thread, "held"):
            cls.on_thread.held = []
        return cls.on_thread.held

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        is_acquired = self._lock.acquire(blocking, timeout)
        if is_acquired:
            # Nobody waits for a lock that is only tried.
            self.held().append(self._name if blocking else "")
        return is_acquired

    def release(self) -> None:
        self.held().pop()
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch the locks of all modules, and those that objects make from now on."""
    for name, module in [*sys.modules.items()]:
        if not name.startswith("lookahead_hf"):
            continue
        for own, value in [*vars(module).items()]:
            if type(value) in KINDS:
                monkeypatch.setattr(module, own, Watched(value, f"{name}.{own}"))
            elif value is threading:
                watching = {
                    kind: lambda kind=kind, name=name: Watched(getattr(threading, kind)(), name)
                    for kind in ("Lock", "RLock")
                }
                monkeypatch.setattr(module, own, SimpleNamespace(**{**vars(threading), **watching}))


@dataclass
class Calls:
    """How often code of the caller ran; it runs without locks."""

    counts: Counter[str]

    def note(self, kind: str) -> None:
        held = {*Watched.held()} - {"", GENERATORS}
        assert not held, f"{kind} under {held}"
        self.counts[kind] += 1

    def noting(self, kind: str, returns: Callable[..., Any] = lambda *_: None) -> Any:
        """A function that notes its calls."""

        def run(*args: Any, **_: Any) -> Any:
            self.note(kind)
            return returns(*args)

        return run


@pytest.fixture
def calls() -> Calls:
    return Calls(Counter())


def watched_model(**own: Any) -> Any:
    """A model whose state has a watched lock."""
    model = lookahead_hf.enable(tiny("llama", **own))
    state_of(model).lock = Watched(threading.RLock(), "state")  # type: ignore[assignment]
    return model


class Proposing(Drafter):
    """A drafter that is asked for its hash and compared, too."""

    name = "proposing"

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def propose(self, rows: Rows, max_nodes: int) -> Any:
        self._calls.note("propose")
        return lookahead_hf.DraftTree.from_rows([chain([5, 6])] * rows.num_rows)

    def __hash__(self) -> int:
        self._calls.note("hash")
        return 1

    def __eq__(self, other: object) -> bool:
        self._calls.note("equal")
        return self is other


class Hearing(BaseStreamer):
    """A streamer."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def put(self, value: Any) -> None:
        self._calls.note("streamer")

    def end(self) -> None:
        self._calls.note("streamer")


def callers(calls: Calls) -> dict[str, Any]:
    """Code of a caller, as arguments of `generate`."""
    process = calls.noting("processor", lambda ids, scores: scores)
    stop = calls.noting("criterion", lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool))
    return {
        "logits_processor": LogitsProcessorList([process]),
        "stopping_criteria": StoppingCriteriaList([stop]),
        "prefix_allowed_tokens_fn": calls.noting("prefix", lambda row, ids: [*range(3, 99)]),
    }


@pytest.mark.parametrize("compiled", [True, False])
def test_a_call(calls: Calls, compiled: bool) -> None:
    model = watched_model()
    lookahead_hf.on_stats(model, calls.noting("on_stats"))
    drafters = (Proposing(calls), "ngram", "pool")
    config = SpeculativeConfig(drafters, budget=6, learn=True, compiled_layers=compiled)
    call = {"max_new_tokens": 12, "pad_token_id": 0}
    for rows in (1, 2):
        streamed = {"streamer": Hearing(calls)} if rows == 1 else {}
        model.generate(prompt(rows), **call, **callers(calls), **streamed, speculative=config)
        served(model)
    lookahead_hf.warm_up(model, context_length=20, max_draft_nodes=4)
    kinds = {"processor", "criterion", "prefix", "streamer", "propose", "on_stats"}
    assert kinds <= calls.counts.keys()


def test_requests(calls: Calls) -> None:
    model = watched_model()
    model.model.layers[1].register_forward_hook(calls.noting("hook"))
    lookahead_hf.set_default(model, {"budget": 6})
    own = callers(calls)

    async def ask(manager: Any) -> None:
        ended = asyncio.Event()

        def hear(output: Any) -> None:
            calls.note("handler")
            if output.is_finished():
                ended.set()

        manager.register_result_handler("a", hear)
        manager.add_request(prompts(1)[0], request_id="a", **own)
        await asyncio.wait_for(ended.wait(), WAIT)

    with running(model, settings(model)) as manager:
        asyncio.run(ask(manager))
    assert {"hook", "processor", "criterion", "prefix", "handler"} <= calls.counts.keys()
