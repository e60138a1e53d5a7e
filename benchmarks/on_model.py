"""Runs the model to know what it expects after every node of a draft, rejected ones included."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from record import best_tokens
from replay import Recorded, Seen, Text, joined
from transformers import DynamicCache

from lookahead_hf.draft import ROOT, DraftTree
from lookahead_hf.model.compat import GENERATE_CACHE


class OnModel(Recorded):
    """Runs the model on every draft of a recorded text, on top of the text's cache."""

    def __init__(self, model: Any) -> None:
        """`model` wrote the texts; its layers must attend to the whole text."""
        self._model = model

    @torch.no_grad()
    def begin(self, text: Text) -> None:
        tokens = torch.from_numpy(text.tokens)[None].to(self._model.device)
        self._cache = self._model.get_decoder()(tokens, use_cache=True)[GENERATE_CACHE]

    def seen(self, text: Text, length: int, draft: DraftTree, path: list[int]) -> Seen:
        on_path = super().seen(text, length, draft, path)
        rejected = np.setdiff1d(np.arange(draft.num_nodes), path)
        if not len(rejected):
            return on_path
        ids, probs = self._expected(length, draft)
        parents = draft.parents[rejected]
        before = np.where(parents == ROOT, text.tokens[length - 1], draft.token_ids[parents])
        last = draft.token_ids[rejected]
        return joined(Seen(before, last, ids[rejected], probs[rejected]), on_path)

    @torch.no_grad()
    def _expected(self, length: int, draft: DraftTree) -> tuple[np.ndarray, np.ndarray]:
        """Return the likeliest tokens after each node and their probabilities, [nodes, top]."""
        device = self._model.device
        cache = DynamicCache()
        for number, layer in enumerate(self._cache.layers):
            cache.update(layer.keys[:, :, :length], layer.values[:, :, :length], number)
        logits = self._model(
            torch.from_numpy(draft.token_ids)[None].to(device),
            position_ids=torch.from_numpy(length - 1 + draft.depth)[None].long().to(device),
            attention_mask=_mask(draft.parents, length).to(device),
            **{GENERATE_CACHE: cache},
        ).logits[0]
        return best_tokens(logits)


def _mask(parents: np.ndarray, length: int) -> torch.Tensor:
    """Return which keys a node attends to: the text, its ancestors, itself, [1, 1, nodes, keys]."""
    mask = torch.zeros(len(parents), length + len(parents), dtype=torch.bool)
    mask[:, :length] = True
    for node, parent in enumerate(parents.tolist()):
        if parent != ROOT:
            mask[node] = mask[parent]
        mask[node, length + node] = True
    return mask[None, None]
