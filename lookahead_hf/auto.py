"""Importing this module enables speculation for every model of the process."""

from __future__ import annotations

from lookahead_hf.hook import enable_everywhere

enable_everywhere()
