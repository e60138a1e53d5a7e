"""The drafter "grammar"."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from lookahead_hf.draft import DraftTree, Evidence
from lookahead_hf.drafting.drafter import Guard, Refiner, Traits, warn_of_failure
from lookahead_hf.sources.grammar.growth import PRIOR, Refinement
from lookahead_hf.sources.grammar.vocabulary import Probe, Vocabulary, Whitespace

if TYPE_CHECKING:
    from lookahead_hf.logits.grammars.protocol import Grammar
    from lookahead_hf.rows import Rows


@dataclass(slots=True)
class _Row:
    """A row's grammar after the `num_read` tokens of the text that it has read."""

    grammar: Grammar
    vocabulary: Vocabulary | None
    whitespace: Whitespace = field(default_factory=Whitespace)
    num_read: int = 0

    def read(self, emitted: np.ndarray) -> None:
        for token in emitted[self.num_read :].tolist():
            self.num_read += 1
            if not self.grammar.ended() and not self.grammar.advance(token):
                raise ValueError("the text is not one of the grammar that the processor obeys")
            if self.vocabulary is not None:
                self.whitespace.learn(self.vocabulary.texts[token])


class GrammarDrafter(Refiner):
    """Refines the draft of all other sources by the grammar that each text has to obey.

    It proposes nothing alone: a text that a grammar forces often begins where another source's
    guess ends.
    """

    name: ClassVar[str] = "grammar"
    traits = Traits(len(PRIOR), PRIOR, sees_all=False)

    def __init__(
        self,
        grammar_of: Callable[[int], Grammar | None],
        vocabularies: MutableMapping[str, Vocabulary],
    ) -> None:
        """Draft with the grammars that `grammar_of` makes of rows, None for rows without one.

        `vocabularies` is what the model's calls share of their tokenizers, by `Grammar.vocabulary`.
        """
        self._grammar_of, self._vocabularies = grammar_of, vocabularies
        self._rows: dict[int, _Row] = {}
        lost = "a text whose grammar it cannot follow"
        self._guard = Guard([partial(warn_of_failure, self.name, part=lost)])  # once for all rows

    def begin(self, rows: Rows) -> None:
        for row in range(rows.num_rows):
            self.begin_row(rows, row)

    def begin_row(self, rows: Rows, row: int) -> None:
        self.end_row(rows, row)
        self._guard.run(0, self._begin, row, always=True)

    def _begin(self, row: int) -> None:
        grammar = self._grammar_of(row)
        if grammar is not None:
            self._rows[row] = _Row(grammar, self._vocabulary(grammar))
            self.is_listed = self.refines = True

    def end_row(self, rows: Rows, row: int) -> None:
        self._rows.pop(row, None)
        self.refines = bool(self._rows)

    def _vocabulary(self, grammar: Grammar) -> Vocabulary | None:
        key = grammar.vocabulary
        if key not in self._vocabularies and (texts := grammar.texts()) is not None:
            self._vocabularies[key] = Vocabulary(texts)
        return self._vocabularies.get(key)

    def refine(
        self, rows: Rows, tree: DraftTree, source: int, max_nodes: int, max_depth: np.ndarray
    ) -> DraftTree:
        drafts = []
        for row in range(rows.num_rows):
            draft = Refinement(tree, row, source, self.rates)
            if row in self._rows and rows.live[row] and max_depth[row] > 0:
                given = row, draft, rows.emitted(row), max_nodes
                if not self._guard.run(0, self._refine, *given, always=True):
                    self.end_row(rows, row)  # a grammar that fails costs its own text alone
                    draft = Refinement(tree, row, source, self.rates)
            drafts.append((draft, *draft.best(max_nodes, int(max_depth[row]))))
        return _tree(drafts)

    def _refine(self, row: int, draft: Refinement, emitted: np.ndarray, max_nodes: int) -> bool:
        state = self._rows[row]
        state.read(emitted)
        draft.run(Probe(state.grammar), state.whitespace, state.vocabulary, max_nodes)
        return True


def _tree(drafts: list[tuple[Refinement, list[int], list[int], list[float]]]) -> DraftTree:
    tree = DraftTree.from_rows(
        ([draft.tokens[node] for node in order], parents) for draft, order, parents, _ in drafts
    )
    entries = [draft.entries[node] for draft, order, *_ in drafts for node in order]
    offsets = np.cumsum([0, *map(len, entries)], dtype=np.int64)
    flat = np.array([pair for each in entries for pair in each], np.int32).reshape(-1, 2)
    scores = np.array([chance for *_, chances in drafts for chance in chances], np.float32)
    evidence = Evidence(offsets, flat[:, 0].copy(), flat[:, 1].copy())
    return replace(tree, score=scores, evidence=evidence)
