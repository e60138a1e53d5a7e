"""What a server grants each request, so that none keeps the others waiting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _limit(default: Any, what: str) -> Any:
    return field(default=default, metadata={"what": what})


@dataclass(frozen=True)
class Limits:
    """The limits of a server; each is an option `--max-NAME` of `lookahead-hf serve`."""

    body_mb: float = _limit(10.0, "MB of a request")
    stop_strings: int = _limit(16, "strings of `stop`")
    stop_characters: int = _limit(256, "characters of a string of `stop`")
    schema_kb: float = _limit(64.0, "KB of a JSON schema, or of the tools to be called")
    compile_seconds: float = _limit(5.0, "seconds to compile a schema")
    waiting: int = _limit(256, "requests that wait for their first token")
    seconds: float = _limit(600.0, "seconds from a request's arrival to the end of its answer")
    tokens: int | None = _limit(
        None, "tokens of a prompt and its answer; by default the model's positions"
    )
    choices: int = _limit(8, "answers to a prompt, `n`")
    prompts: int = _limit(32, "prompts of a completion")


USUAL = Limits()
"""The limits of a server that is told no others."""
