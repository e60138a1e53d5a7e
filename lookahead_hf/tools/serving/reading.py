"""Reads requests in threads, so that a large one does not hold the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import copy_context
from types import coroutine
from typing import Any

from lookahead_hf.model import compat
from lookahead_hf.tools.serving.fields import Limits, Reach, ServedRequest, current


async def read(threads: Executor, work: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns, called in one of some threads."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(threads, copy_context().run, work, *args)


def reading(threads: Executor, handle: Callable[..., Any]) -> Callable[..., Any]:
    """Return a handler of transformers' server that runs in a thread until it awaits the model."""

    async def read_and_handle(body: dict[str, Any], request_id: str) -> Any:
        request, loop = current.get() or ServedRequest(), asyncio.get_running_loop()

        def begin() -> tuple[Any, Any]:
            asyncio._set_running_loop(loop)  # for futures that it makes
            try:
                running = handle({**(request.body or body)}, request_id)
                return running, running.send(None)
            except StopIteration as end:
                return None, end.value
            finally:
                asyncio._set_running_loop(None)
                if request.is_cancelled:  # meanwhile
                    request.when_over()

        running, found = await read(threads, begin)
        request.when_read()
        return found if running is None else await _rest(running, found)

    return read_and_handle


@coroutine
def _rest(running: Coroutine[Any, Any, Any], awaited: Any) -> Generator[Any, Any, Any]:
    """Run the rest of a coroutine, which awaits a future."""
    try:
        yield awaited
        return (yield from running.__await__())
    finally:
        running.close()


def reach_of(model: Any, tokenizer: Any, limits: Limits) -> Reach:
    """Return what a model can read."""
    template = str(getattr(tokenizer, "chat_template", None) or "tools")
    tokenizer, text = getattr(tokenizer, "tokenizer", tokenizer), compat.text_config(model)
    most = limits.tokens
    if most is None and not model.config.is_encoder_decoder:
        most = getattr(text, "max_position_embeddings", None)
    most = most if isinstance(most, int) and most > 0 else None
    longest = max(map(len, tokenizer.get_vocab()))
    return Reach(int(text.vocab_size), most, longest, tokenizer, "tools" in template)
