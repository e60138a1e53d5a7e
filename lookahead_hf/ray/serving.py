"""Ray Serve: the application of `lookahead-hf serve`, with a pool for each session."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Any

import lookahead_hf
from lookahead_hf.config import SpeculativeConfig, check_int
from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.serving.fields import current

HEADER = b"x-session-id"
"""Names the session of a request. Ray's consistent hash router reads the same header."""

SESSION_TOKENS = 100_000
"""Most tokens that are kept of a session, at 34 bytes each."""


def application(
    model: str, speculative: Any = True, *, session_pools: int = 0, **options: Any
) -> Any:
    """Build the application of `lookahead-hf serve`, to be run by any ASGI server.

    It loads the model, so call it in the process that serves.

    Args:
        model: A folder or a name of the Hugging Face hub.
        speculative: How to speculate where a request does not say, as in `generate`.
        session_pools: Most sessions whose texts are kept. A request with the header `x-session-id`
            drafts from the earlier answers of its session, and from nobody else's.
        **options: Options of transformers' `Serve`, such as `device` and `dtype`.

    Returns:
        The application, a FastAPI object.

    Raises:
        ValueError: `speculative` or `session_pools` has a value that is not allowed.
    """
    config = SpeculativeConfig.resolve(speculative)
    check_int("session_pools", session_pools, 0, 2**20)
    if config is None:
        raise ValueError(f"speculative={speculative!r}: without speculation, transformers serves")
    if session_pools and (config.pool is not None or config.learn):
        raise ValueError("session_pools= replaces pool and learn of speculative=: leave them out")

    from starlette.middleware import Middleware
    from transformers.cli.serve import Serve

    from lookahead_hf.serving.server import speculating

    class Unstarted(Serve):
        def start_server(self) -> None:
            """Leave that to the caller."""

    with speculating(config, partial(lookahead_hf.warm_up, progress=False)):
        served = Unstarted(force_model=model, non_blocking=True, **options)
    app = served.server.config.app
    if session_pools:  # behind the middleware that reads a request's own fields
        app.user_middleware.append(Middleware(SessionPools, config=config, most=session_pools))
    return app


class SessionPools:
    """An ASGI middleware that gives the requests of each session a pool of their own.

    Args:
        app: The application that answers.
        config: How the server speculates where a request does not say.
        most: Most sessions; the one that was idle longest leaves first.
    """

    def __init__(self, app: Any, config: SpeculativeConfig, most: int) -> None:
        self._app, self._config, self._most = app, config, most
        self._pools: OrderedDict[bytes, NgramPool] = OrderedDict()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, as ASGI asks for."""
        request, session = current.get(), dict(scope.get("headers", ())).get(HEADER)
        if request is not None and session and request.speculative is not False:
            own = request.speculative
            asked = own if isinstance(own, SpeculativeConfig) else self._config
            request.speculative = replace(asked, pool=self._pool(session), learn=True)
        await self._app(scope, receive, send)

    def _pool(self, session: bytes) -> NgramPool:
        if session not in self._pools:
            self._pools[session] = NgramPool(SESSION_TOKENS)
        self._pools.move_to_end(session)
        if len(self._pools) > self._most:
            self._pools.popitem(last=False)
        return self._pools[session]
