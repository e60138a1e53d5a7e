"""One block of a draft tree through a model, outside of `generate`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from lookahead_hf.draft import DraftTree
from lookahead_hf.rows import Rows
from lookahead_hf.runner import attention
from lookahead_hf.runner.host import Runner


@torch.no_grad()
def logits_of_a_tree(model: Any, prompt: torch.Tensor, tree: DraftTree) -> torch.Tensor:
    """Logits of the last tokens and the tree behind a prompt [rows, columns]."""
    target = Runner(model, len(prompt))
    with attention.laid_under(model):
        target.start(prompt, DynamicCache(config=model.config))
        rows = Rows(prompt.cpu().numpy())
        for row in range(len(prompt)):
            rows.emit(row, 9)
        outputs = target.forward(target.layout(rows, tree))
    target.end()
    return outputs.logits
