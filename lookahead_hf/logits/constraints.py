"""Recognises processors that constrain a text by a grammar, by class paths, without imports."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from lookahead_hf.logits.grammars import Grammar, LLGuidance, OutlinesCore, XGrammar
from lookahead_hf.model import compat


@dataclass(frozen=True)
class Constraint:
    """A processor that constrains each row by a grammar of its own."""

    processor: Any  # the caller's processor, which has not been called yet
    # Makes a row's grammar for drafting, independent of the processor's own
    shadow: Callable[[int], Grammar]
    # Makes a processor that does to a single row what the caller's does to this row of a batch;
    # None if that is unknown, so that only the caller's may be called.
    alone: Callable[[int], Any] | None = None
    matchers: str = ""  # the attribute with the processor's state of each row
    advance: Callable[[Any, int], Any] | None = None  # moves such a state over a token
    columns: str = ""  # the attribute with the columns that the processor saw last, if any

    def settle(self, ids: torch.Tensor, scores: torch.Tensor, texts: Sequence[list[int]]) -> None:
        """Leave the caller's processor as plain generation leaves it, if its class is known.

        `ids` are the prompts as plain generation holds them, [rows, columns]; `scores`, [rows,
        vocab] float32, are overwritten; `texts` are the tokens that it would have been shown.
        """
        if self.advance is None:
            return
        self.processor(ids, scores)
        for matcher, text in zip(getattr(self.processor, self.matchers), texts, strict=True):
            for token in text:
                self.advance(matcher, token)
        if self.columns:
            setattr(self.processor, self.columns, ids.shape[1] + max(map(len, texts)))


def recognise(processor: Any, num_rows: int) -> Constraint | None:
    """Return the constraint that a processor stands for in a batch, None if it is unknown.

    A caller's class may have a method `row_grammars(num_rows)` that returns a `Grammar` for each
    row for drafting. If it also has `row_processors(num_rows)`, batches call the processors for
    single rows that this returns; otherwise the processor is called as any other.
    """
    kind = type(processor)
    known = _KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")
    if known is not None:
        return known(processor, num_rows)
    if not hasattr(kind, "row_grammars"):
        return None
    made: dict[int, Grammar] = {}

    def shadow(row: int) -> Grammar:
        if row not in made:
            made.update(enumerate(processor.row_grammars(num_rows)))
        return made.pop(row)

    if num_rows == 1 or not hasattr(kind, "row_processors"):
        return Constraint(processor, shadow)
    each = cache(lambda: processor.row_processors(num_rows))
    return Constraint(processor, shadow, lambda row: each()[row])


def find_constraint(processors: Any, num_rows: int) -> Constraint | None:
    """Return the constraint of the first recognised processor, None if there is none."""
    found = (recognise(processor, num_rows) for processor in processors)
    return next((constraint for constraint in found if constraint is not None), None)


def _xgrammar(processor: Any, num_rows: int) -> Constraint | None:
    grammars = processor.compiled_grammars
    if processor.matchers or processor.prefilled or len(grammars) not in (1, num_rows):
        return None
    grammars = grammars * num_rows if len(grammars) == 1 else list(grammars)
    return Constraint(
        processor,
        lambda row: XGrammar(grammars[row]),
        lambda row: type(processor)(grammars[row]),
        "matchers",
        _accept,
        "_columns" if "_columns" in vars(type(processor)) else "",
    )


def _outlines(
    grammar: Callable[[Any], Grammar],
    matchers: str,
    advance: Callable[[Any, int], Any],
    processor: Any,
    num_rows: int,
) -> Constraint | None:
    """Recognise a processor of outlines, which makes its matchers when it is first called."""
    if not processor.is_first_token:
        return None
    shadow, alone = lambda row: grammar(processor), lambda row: copy.copy(processor)
    return Constraint(processor, shadow, alone, matchers, advance)


def _accept(matcher: Any, token: int) -> None:
    if not matcher.is_terminated():
        matcher.accept_token(token)


def _advance_guide(guide: Any, token: int) -> None:
    if not guide.is_finished() or guide.accepts_tokens([token]):
        guide.advance(token_id=token, return_tokens=False)


_KNOWN: dict[str, Callable[[Any, int], Constraint | None]] = {
    "lookahead_hf.structured.Processor": _xgrammar,
    "xgrammar.contrib.hf.LogitsProcessor": _xgrammar,
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": partial(
        _outlines, lambda its: OutlinesCore(its.index), compat.OUTLINES_GUIDES, _advance_guide
    ),
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": partial(
        _outlines, lambda its: XGrammar(its.compiled_grammar), compat.OUTLINES_MATCHERS, _accept
    ),
    "outlines.backends.llguidance.LLGuidanceLogitsProcessor": partial(
        _outlines,
        lambda its: LLGuidance(its.llg_tokenizer, its.grammar),
        "ll_matchers",
        lambda matcher, token: matcher.consume_token(token),
    ),
}
"""Constraints by the path of the processor's class; subclasses do not count."""
