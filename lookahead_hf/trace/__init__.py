"""The trace of a call: the draft of every step, what was accepted, and who foresaw each token."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, zip_longest
from typing import Any

from lookahead_hf.call import optional

MODEL = "model"  # The origin of a token that no source foresaw: the model itself added it

PARTS = ("prefill", "draft", "forward", "verify", "commit")
"""The timed parts of a step, in their order."""


@dataclass(frozen=True, slots=True)
class TraceNode:
    """A draft token.

    Attributes:
        token: The token id.
        parent: Index of the node before it in the row's draft, -1 for the row's last token.
        depth: Number of draft tokens on the path down to it, itself included.
        sources: Names of the sources that proposed it.
        probability: Estimated probability that the path down to it is accepted; None if another
            process drafted.
        text: The token's text; None until `Trace.with_text` is called.
    """

    token: int
    parent: int
    depth: int
    sources: tuple[str, ...]
    probability: float | None = None
    text: str | None = None

    @property
    def origin(self) -> str:
        """The sources as one name: "ngram", "ngram + recycling", ..."""
        return " + ".join(self.sources)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """The draft and the emitted tokens of one row in one step.

    Attributes:
        row: Index of the row in the batch.
        nodes: The tree of the row's draft; every parent comes before its children.
        accepted: Indices of the accepted nodes, from the root down.
        tokens: The emitted tokens: the accepted ones, then the one that the model itself added. At
            the end of a text, the last token counts as the model's own, even if it was drafted.
        texts: The text that each emitted token adds; None until `Trace.with_text` is called.
    """

    row: int
    nodes: tuple[TraceNode, ...]
    accepted: tuple[int, ...]
    tokens: tuple[int, ...]
    texts: tuple[str, ...] | None = None

    @property
    def origins(self) -> tuple[str, ...]:
        """Who foresaw each emitted token: the origin of an accepted node, or `MODEL`.

        A token that the caller's processor or criterion wrote over a draft token was not foreseen.
        """
        accepted = [self.nodes[index] for index in self.accepted]
        return tuple(
            node.origin if node is not None and node.token == token else MODEL
            for token, node in zip_longest(self.tokens, accepted)
        )


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One forward of the target with its draft, verification and commit.

    Attributes:
        rows: The rows whose text went on in the step.
        start_ms: When the step began, counted from the beginning of the call.
        total_ms: How long it took, with what belongs to no part, such as the caller's streamer.
        prefill_ms: Time of the prefill; only the first step of a call has one.
        draft_ms: Time spent drafting and learning.
        forward_ms: Time spent on laying out and running the target's forward.
        verify_ms: Time spent verifying.
        commit_ms: Time spent on the cache after verification.
    """

    rows: tuple[TraceRow, ...]
    start_ms: float
    total_ms: float
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    forward_ms: float = 0.0
    verify_ms: float = 0.0
    commit_ms: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Milliseconds of each part that took time."""
        spent = {name: float(getattr(self, f"{name}_ms")) for name in PARTS}
        return {name: ms for name, ms in spent.items() if ms > 0}


@dataclass(frozen=True, slots=True)
class Trace:
    """All steps of a call. The first one is the prefill, which emits one token per row.

    Where `generate` decodes several times, as Whisper's does for every segment, the steps of all
    decodings follow each other, and the texts of equal rows are joined.

    Attributes:
        num_rows: Rows of the batch.
        steps: The steps in their order.
        fallback_reason: Why nothing was speculated, None where it was. Then there are no steps.
    """

    num_rows: int = 0
    steps: tuple[TraceStep, ...] = ()
    fallback_reason: str | None = None

    def tokens(self, row: int) -> list[int]:
        """The tokens that a row emitted, without pads."""
        return [token for each in self._steps_of(row) for token in each.tokens]

    def origins(self, row: int) -> list[str]:
        """Who foresaw each token that a row emitted; see `TraceRow.origins`."""
        return [origin for each in self._steps_of(row) for origin in each.origins]

    def texts(self, row: int) -> list[str]:
        """The text that each token of a row adds; without `with_text`, its id and a space."""
        steps = self._steps_of(row)
        shown = (each.texts or [f"{token} " for token in each.tokens] for each in steps)
        return [text for texts in shown for text in texts]

    @property
    def num_by_origin(self) -> dict[str, int]:
        """Number of emitted tokens by origin, the model itself first, then the most frequent."""
        rows = range(self.num_rows)
        counts = Counter(origin for row in rows for origin in self.origins(row))
        return {MODEL: counts.pop(MODEL, 0), **dict(counts.most_common())}

    def with_text(self, tokenizer: Any) -> Trace:
        """Return the same trace with the text of all tokens.

        Args:
            tokenizer: The model's tokenizer, or anything whose `decode` turns ids into text.
        """
        rows = range(self.num_rows)
        pieces = [iter(pieces_of(tokenizer, self.tokens(row))) for row in rows]
        decoded = cache(lambda token: tokenizer.decode([token]))

        def written(each: TraceRow) -> TraceRow:
            nodes = tuple(replace(node, text=decoded(node.token)) for node in each.nodes)
            return replace(
                each, nodes=nodes, texts=tuple(islice(pieces[each.row], len(each.tokens)))
            )

        steps = [replace(step, rows=tuple(map(written, step.rows))) for step in self.steps]
        return replace(self, steps=tuple(steps))

    def to_html(self) -> str:
        """Return one HTML page that shows the trace and loads nothing from anywhere."""
        return str(optional.load("pages of a trace").page(self))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as values that `json.dumps` takes."""
        return dataclasses.asdict(self)

    def __add__(self, other: Trace) -> Trace:
        end = self.steps[-1].start_ms + self.steps[-1].total_ms if self.steps else 0.0
        later = tuple(replace(step, start_ms=step.start_ms + end) for step in other.steps)
        reason = self.fallback_reason or other.fallback_reason
        return Trace(max(self.num_rows, other.num_rows), self.steps + later, reason)

    def _steps_of(self, row: int) -> list[TraceRow]:
        return [each for step in self.steps for each in step.rows if each.row == row]


def pieces_of(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, ...]:
    """Split the text of tokens into what each of them adds.

    A token's text may depend on the tokens before it. So every token is decoded together with those
    that the latest piece came from. A character of several tokens belongs to the last of them: some
    pieces are empty. All that is asked of the tokenizer is `decode`.
    """
    pieces = [""] * len(tokens)
    context = done = 0  # where the latest piece's tokens begin and end
    for index in range(len(tokens)):
        known = tokenizer.decode(list(tokens[context:done]))
        text = tokenizer.decode(list(tokens[context : index + 1]))
        if text.endswith("\ufffd") and index + 1 < len(tokens):
            continue  # bytes that are not a whole character yet
        pieces[index] = text[len(known) :]
        context, done = done, index + 1
    return tuple(pieces)
