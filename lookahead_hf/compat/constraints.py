"""Where outlines' logits processors keep the state of each row."""

from __future__ import annotations

OUTLINES_GUIDES = "_guides"
"""Of the one for outlines-core."""

OUTLINES_MATCHERS = "_matchers"
"""Of the one for xgrammar."""
