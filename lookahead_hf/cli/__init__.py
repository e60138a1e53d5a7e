"""The command `lookahead-hf`."""

from __future__ import annotations

from lookahead_hf.cli.main import main

__all__ = ["main"]
