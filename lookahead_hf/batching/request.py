"""A door: `request_seed` under its first name."""

from __future__ import annotations

from lookahead_hf.queue.request import request_seed

__all__ = ["request_seed"]
