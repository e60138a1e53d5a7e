"""A drafter of your own: it only guesses, so a bad one costs speed and never changes the text."""

from __future__ import annotations

from typing import Any

from _model import ask, load

import lookahead_hf
from lookahead_hf import Drafter, DraftTree, SpeculativeConfig
from lookahead_hf.rows import Rows


class Glossary(Drafter):
    """Completes terms that are known to come up, from any of their tokens on."""

    name = "glossary"

    def __init__(self, tokenizer: Any, terms: list[str]) -> None:
        self.terms = [tokenizer(term, add_special_tokens=False).input_ids for term in terms]

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        return DraftTree.from_chains(
            [] if rows.finished[row] else self.endings(rows.last_token(row))
            for row in range(rows.num_rows)
        )

    def endings(self, last: int) -> list[list[int]]:
        return [ids[at + 1 :] for ids in self.terms for at in range(len(ids)) if ids[at] == last]


model, tokenizer = load()
inputs = ask(tokenizer, "What is the difference between supervised and reinforcement learning?")
glossary = Glossary(tokenizer, [" supervised learning algorithm", " reinforcement learning agent"])
config = SpeculativeConfig(drafters=("ngram", glossary))

output = model.generate(**inputs, max_new_tokens=96, do_sample=False, speculative=config)
print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
for name, counts in lookahead_hf.last_stats(model).per_source.items():
    print(f"{name}: {counts.accepted} of {counts.drafted} draft tokens accepted")
