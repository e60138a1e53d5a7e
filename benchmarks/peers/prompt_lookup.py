"""Prompt lookup of transformers: its own class, called for one draft at a time."""

from __future__ import annotations

import numpy as np
import torch
from replay import Contender, Seen
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from lookahead_hf.draft import DraftTree


class PromptLookup(Contender):
    """The first earlier occurrence of the longest match of at most `ngram_size` tokens."""

    def __init__(self, ngram_size: int = 2, num_tokens: int = 10) -> None:
        """The defaults are those of transformers; Spec-Bench ran it with 3 and 10."""
        self.name = f"HF prompt lookup ({ngram_size})"
        self.settings = f"matches of <= {ngram_size}, {num_tokens} tokens"
        self._generator = PromptLookupCandidateGenerator(
            num_output_tokens=num_tokens, max_matching_ngram_size=ngram_size, max_length=1 << 30
        )

    def begin(self, tokens: np.ndarray, prompt: Seen) -> None:
        self._tokens = torch.from_numpy(tokens.copy())

    def propose(self) -> DraftTree:
        found, _ = self._generator.get_candidates(self._tokens[None])
        return DraftTree.from_chains([[found[0, len(self._tokens) :].tolist()]])

    def observe(self, draft: DraftTree, path: list[int], emitted: np.ndarray, seen: Seen) -> None:
        self._tokens = torch.cat([self._tokens, torch.from_numpy(emitted)])
