"""What a command of `lookahead-hf` writes when a test runs it in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Said(NamedTuple):
    """What a command wrote."""

    out: str
    err: str

    @property
    def result(self) -> Any:
        """What `--json` writes."""
        return json.loads(self.out)


Run = Callable[..., Said]
"""Runs the command of some words, and asserts its exit code, which is 0 without `code=`."""
