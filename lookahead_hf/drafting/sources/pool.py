"""A door: `fingerprint` under its first name."""

from __future__ import annotations

from lookahead_hf.sources.pool import fingerprint

__all__ = ["fingerprint"]
