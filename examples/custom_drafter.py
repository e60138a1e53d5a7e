"""Write a drafter of your own: this one knows how the letters of an office go on."""

from __future__ import annotations

from collections.abc import Sequence

from _model import ask, compare, load, timed

import lookahead_hf
from lookahead_hf import Drafter, DraftTree, SpeculativeConfig
from lookahead_hf.rows import Rows


class Letters(Drafter):
    """Drafts what followed the latest tokens of the text in earlier letters.

    A letter that goes on in another way costs speed, but never changes the text.
    """

    name = "letters"

    def __init__(self, letters: Sequence[Sequence[int]], match: int = 3, length: int = 12) -> None:
        self.match = match
        self.following: dict[tuple[int, ...], list[Sequence[int]]] = {}
        for ids in letters:
            for at in range(match, len(ids)):
                known = self.following.setdefault(tuple(ids[at - match : at]), [])
                known.append(ids[at : at + length])

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        return DraftTree.from_chains(
            [] if rows.finished[row] else self.endings(rows.context(row).tolist())
            for row in range(rows.num_rows)
        )

    def endings(self, text: list[int]) -> list[Sequence[int]]:
        return self.following.get(tuple(text[-self.match :]), [])


TASK = """Write this letter to {name}: "Dear NAME, thank you for the order of ARTICLE. It will
be sent within three working days. If anything is missing, please call us, and we will send it at
once. Yours sincerely, the sales team." The article is {article}."""
EARLIER = ({"name": "Ms Jones", "article": "a lamp"}, {"name": "Dr Wu", "article": "two chairs"})

model, tokenizer = load()
limits = {"max_new_tokens": 96, "do_sample": False}
letters = []  # in your program, a file of what has been sent
for order in EARLIER:
    asked = ask(tokenizer, TASK.format(**order))
    letters.append(model.generate(**asked, **limits)[0, asked.input_ids.shape[1] :].tolist())

inputs = ask(tokenizer, TASK.format(name="Mr Smith", article="a table"))
# To keep the built-in drafters: drafters=("ngram", "recycling", Letters(letters)).
config = SpeculativeConfig(drafters=(Letters(letters),))
plain, plain_seconds = timed(model.generate, **inputs, **limits)
fast, seconds = timed(model.generate, **inputs, **limits, speculative=config)

print(tokenizer.decode(fast[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
print("identical:", plain.equal(fast))
compare(model, plain_seconds, seconds)
for name, counts in lookahead_hf.last_stats(model).per_source.items():
    print(f"{name}: {counts.accepted} of {counts.drafted} draft tokens accepted")
