"""Write a drafter of your own: a bad draft costs speed, but never changes the text."""

from __future__ import annotations

from typing import Any

from _model import ask, compare, load, timed

import lookahead_hf
from lookahead_hf import Drafter, DraftTree, SpeculativeConfig
from lookahead_hf.rows import Rows


class Glossary(Drafter):
    """Completes terms that are likely to come up, from any of their tokens on."""

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
terms = [" machine learning model", " decision trees", " linear regression", " labeled data"]
glossary = Glossary(tokenizer, terms)
# With a fixed budget every draft is verified; "auto" would first measure what drafts cost.
config = SpeculativeConfig(drafters=(glossary,), budget=4)
limits = {"max_new_tokens": 96, "do_sample": False}

plain, plain_seconds = timed(model.generate, **inputs, **limits)
fast, seconds = timed(model.generate, **inputs, **limits, speculative=config)

print(tokenizer.decode(fast[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
print("identical:", plain.equal(fast))
compare(model, plain_seconds, seconds)
for name, counts in lookahead_hf.last_stats(model).per_source.items():
    print(f"{name}: {counts.accepted} of {counts.drafted} draft tokens accepted")
