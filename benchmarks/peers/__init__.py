"""Training-free drafters of other projects, written anew from their descriptions."""

from __future__ import annotations

from .logitspec import LogitSpec
from .prompt_lookup import PromptLookup
from .sam_decoding import SamDecoding
from .suffix_decoding import SuffixDecoding
from .token_recycling import TokenRecycling

__all__ = ["LogitSpec", "PromptLookup", "SamDecoding", "SuffixDecoding", "TokenRecycling"]
