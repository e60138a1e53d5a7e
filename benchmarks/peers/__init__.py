"""Training-free drafters of other projects, rewritten from their descriptions."""

from __future__ import annotations

from peers.logitspec import LogitSpec
from peers.prompt_lookup import PromptLookup
from peers.racer import Racer
from peers.sam_decoding import SamDecoding
from peers.suffix_decoding import SuffixDecoding
from peers.token_recycling import TokenRecycling

__all__ = [
    "LogitSpec",
    "PromptLookup",
    "Racer",
    "SamDecoding",
    "SuffixDecoding",
    "TokenRecycling",
]
