"""Calls of `generate` whose texts obey a grammar, compared with plain's."""

from __future__ import annotations

import json
from typing import Any

import torch

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from tests.helpers import grammars
from tests.helpers.compared import served
from tests.helpers.grammars import END, PAD, processor

BUDGET = SpeculativeConfig(budget=8, on_fallback="error")


def prompts(rows: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts of different lengths."""
    ids = torch.randint(3, 300, (rows, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 2 * row] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def generate(model: Any, processors: list[Any], rows: int = 1, **more: Any) -> Any:
    torch.manual_seed(5)
    given = {
        **prompts(rows),
        "max_new_tokens": 90,
        "pad_token_id": PAD,
        "logits_processor": processors,
        "do_sample": False,
        "speculative": BUDGET,
        **more,
    }
    return model.generate(**given)


def check(
    model: Any, library: str, schemas: Any, **more: Any
) -> tuple[lookahead_hf.SpeculativeStats, Any, Any]:
    """Assert that the texts are plain's; return the statistics and both processors."""
    rows = len(schemas)
    if not library.endswith("strict"):
        more = {"suppress_tokens": grammars.blank_tokens(), **more}
    first, second = processor(library, schemas), processor(library, schemas)
    plain = generate(model, [first], rows, **{**more, "speculative": False})
    ours = generate(model, [second], rows, **{"speculative": BUDGET, **more})
    assert ours.tolist() == plain.tolist()
    stats = served(model)
    assert stats.per_source["grammar"].accepted > 0
    for row in ours[:, 12:].tolist():
        if END in row:
            written = grammars.tokenizer().decode(row[: row.index(END)])
            assert isinstance(json.loads(written, strict=False), dict)
    return stats, first, second


def held(processor: Any) -> Any:
    """What a processor keeps of its texts, in a form that compares."""
    if hasattr(processor, "_guides"):
        return processor.is_first_token, [guide.get_state() for guide in processor._guides]
    for name in ("ll_matchers", "_matchers", "matchers"):
        if hasattr(processor, name):
            found = [*map(_mask, getattr(processor, name))]
            first = getattr(processor, "is_first_token", getattr(processor, "prefilled", None))
            return first, getattr(processor, "shown", None), found
    raise AssertionError("nothing is known of it")


def _mask(matcher: Any) -> Any:
    mask = torch.zeros(1, grammars.WIDTH // 32, dtype=torch.int32)
    if hasattr(matcher, "is_terminated"):
        if matcher.is_terminated():
            return "ended"
        matcher.fill_next_token_bitmask(mask, 0)
    else:
        import llguidance.torch

        llguidance.torch.fill_next_token_bitmask(matcher, mask, 0)
    return mask.tolist()
