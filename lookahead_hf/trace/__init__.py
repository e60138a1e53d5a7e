"""The trace of a call: the draft of every step, what was accepted, and who foresaw each token."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any

from lookahead_hf.call import optional
from lookahead_hf.trace.steps import MODEL, TraceNode, TraceRow, TraceStep, step_from_dict

__all__ = ["MODEL", "Trace", "TraceNode", "TraceRow", "TraceStep"]


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

    def to_perfetto(self) -> dict[str, Any]:
        """Return the steps as Chrome trace events, for `json.dump` and https://ui.perfetto.dev."""
        return dict(optional.load("pages of a trace").events(self))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as values that `json.dumps` takes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trace:
        """Build a trace from what `to_dict` returned, also after it was stored as JSON.

        Raises:
            ValueError: The values are not those of a trace.
        """
        try:
            return cls(**{**values, "steps": tuple(map(step_from_dict, values["steps"]))})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"a trace is built from the dict that its to_dict returned: {error!r}"
            ) from error

    def __add__(self, other: Trace) -> Trace:
        """Join the traces of two decodings of one call."""
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
