"""A source of drafts from outside of the package, by the public contract alone."""

from __future__ import annotations

import torch

import lookahead_hf
from lookahead_hf import Drafter, DraftTree, SpeculativeConfig, Step
from lookahead_hf.rows import Rows
from tests.helpers.models import prompt, tiny


class Successors(Drafter):
    """Drafts what followed each token when it was last seen, in any call."""

    name = "successors"

    def __init__(self) -> None:
        self.after: dict[int, int] = {}

    def begin(self, rows: Rows) -> None:
        self._learn(rows)

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        chains = []
        for row, is_live in enumerate(rows.live.tolist()):
            token, chain = rows.last_token(row), list[int]()
            while is_live and len(chain) < max_nodes and token in self.after:
                token = self.after[token]
                chain.append(token)
            chains.append([chain])
        return DraftTree.from_chains(chains)

    def observe(self, step: Step) -> None:
        self._learn(step.rows)

    def _learn(self, rows: Rows) -> None:
        for row in range(rows.num_rows):
            text = rows.context(row).tolist()
            self.after |= dict(zip(text, text[1:], strict=False))


def test_a_new_source_drafts_and_the_text_is_plains() -> None:
    model, ids = tiny("llama"), prompt(2)
    call = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **call)
    config = SpeculativeConfig(drafters=(Successors(), "recycling"))
    for _ in range(2):  # what it learned in one call drafts for the next one
        assert torch.equal(lookahead_hf.generate(model, ids, speculative=config, **call), plain)
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None
    assert stats.num_accepted > 0
    assert stats.per_source["successors"].accepted > 0
