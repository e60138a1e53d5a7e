"""Drafts what a grammar forces, and drops what it forbids."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import takewhile
from typing import ClassVar

import numpy as np

from lookahead_hf.draft import ROOT, DraftTree, Evidence, RowDraft
from lookahead_hf.drafting.drafter import Guard, Refiner, Traits, warn_of_failure
from lookahead_hf.logits.grammars import Grammar
from lookahead_hf.rows import Rows

_SPLIT = re.compile(rb"(?<=\s)(?= \S)")
"""Tokenizers leave the last of several spaces to the next word."""


class Vocabulary:
    """The bytes of every token id, `texts`, and how a tokenizer makes tokens of a text."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        # SentencePiece has tokens of single bytes first; later ids are the usual ones.
        self._token_of = {bytes(text): token for token, text in enumerate(texts)}
        self.encode = lru_cache(4096)(self._encode)

    def _encode(self, text: bytes) -> list[int]:
        """Return the tokens that a tokenizer makes of a text, up to the first byte it lacks.

        Byte pair encodings number tokens in the order of their merges, so the numbers are enough.
        For other tokenizers a draft may be wrong, nothing else.
        """
        pieces = [piece for part in _SPLIT.split(text) for piece in self._merged(part)]
        known = takewhile(self._token_of.__contains__, pieces)
        return [self._token_of[piece] for piece in known]

    def _merged(self, text: bytes) -> list[bytes]:
        pieces = [text[at : at + 1] for at in range(len(text))]
        while len(pieces) > 1:
            pairs = [first + second for first, second in zip(pieces, pieces[1:], strict=False)]
            ranks = [self._token_of.get(pair, len(self.texts)) for pair in pairs]
            best = min(range(len(ranks)), key=ranks.__getitem__)
            if ranks[best] == len(self.texts):
                break
            pieces[best : best + 2] = [pairs[best]]
        return pieces

    def longest(self, tokens: list[int]) -> list[int]:
        """Return the tokens whose text begins no other one's: `name` of `n`, `na`, `name`."""
        texts = {bytes(self.texts[token]): token for token in tokens}
        return [
            token
            for text, token in texts.items()
            if not any(other != text and other.startswith(text) for other in texts)
        ]


_OPENING, _CLOSING = b"{[", b"}]"
_SPACE = b" \n\r\t"
_QUOTE, _ESCAPE = b'"\\'


class Whitespace:
    """Remembers the latest whitespace after `:`, `,` and brackets, for each depth of nesting."""

    def __init__(self) -> None:
        self._usual: dict[tuple[int, int], bytes] = {}
        self._default = {ord(":"): b" ", ord(","): b" "}  # what most models write
        self._depth = 0
        self._is_quoted = self._is_escaped = False
        self._last, self._space = 0, b""  # what came before the whitespace that is being read

    def learn(self, text: bytes) -> None:
        for char in text:
            if self._is_quoted:
                self._is_quoted = char != _QUOTE or self._is_escaped
                self._is_escaped = char == _ESCAPE and not self._is_escaped
                self._last = char
            elif char in _SPACE:
                self._space += bytes([char])
            else:
                self._note(char)

    def _note(self, char: int) -> None:
        if char in _CLOSING:
            self._depth -= 1
        if key := _place(self._last, char):
            self._usual[key, self._depth] = self._default[key] = self._space
            if self._last in _OPENING and b"\n" in self._space:  # so does each of its lines
                self._usual[ord(","), self._depth] = self._space
        if char in _OPENING:
            self._depth += 1
        self._is_quoted = char == _QUOTE
        self._last, self._space = char, b""

    def before(self, char: int, text: bytes) -> bytes:
        """Return what usually stands before a structural character after the unread `text`."""
        depth = self._depth - (char in _CLOSING)
        depth += sum(map(text.count, _OPENING)) - sum(map(text.count, _CLOSING))
        key = _place(text[-1] if text else self._last, char)
        return self._usual.get((key, depth), self._default.get(key, b""))


def _place(last: int, char: int) -> int:
    """Return the character that the whitespace between two others belongs to, 0 for none."""
    if char in _CLOSING:
        return char
    return last if last in b":,{[" else 0


_STRUCTURE = [bytes([char]) for char in b':,"}]{[']
_MOST_ALLOWED = 64

MOST_SECONDS = 0.5
"""Most time of the processor for one step of a row. An answer takes as long as the text is that a
grammar forces, which may have any length."""


class Probe:
    """A `Grammar` at some node of a draft, with the number of `operations` so far in a step.

    Every operation raises a TimeoutError if the earlier ones have taken too long.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.operations = 0
        self._end = time.thread_time() + MOST_SECONDS

    def _count(self) -> None:
        self.operations += 1
        if time.thread_time() > self._end:
            raise TimeoutError(f"it takes more than {MOST_SECONDS} s per step")

    def advance(self, token: int) -> bool:
        self._count()
        return self.grammar.advance(token)

    def advance_text(self, text: bytes) -> int:
        self._count()
        return self.grammar.advance_text(text)

    def back(self, steps: int) -> None:
        self.operations += steps > 0
        self.grammar.back(steps)

    def forced_tokens(self, limit: int) -> list[int]:
        """Return at most `limit` tokens that are certain."""
        self._count()
        return self.grammar.forced_tokens()[:limit]

    def forced_text(self, limit: int) -> bytes:
        """Return at most `limit` bytes that are certain, without half a character at the end."""
        self._count()
        return self.grammar.forced_text()[:limit].decode("utf-8", "ignore").encode()

    def few_allowed(self) -> list[int] | None:
        """Return the allowed tokens, None if there are many."""
        self._count()
        return self.grammar.allowed(_MOST_ALLOWED)

    def allows(self, text: bytes) -> bool:
        steps = self.advance_text(text)
        self.back(steps)
        return steps > 0

    def is_free(self) -> bool:
        """Return whether a character may follow that only strings and free text hold."""
        return self.allows(b"~")

    def is_number(self) -> bool:
        return self.allows(b"0")

    def only_structure(self) -> bytes:
        """Return the only structural character that may follow, b"" if unsure."""
        if self.is_free() or self.is_number():
            return b""
        possible = [char for char in _STRUCTURE if self.allows(char)]
        return possible[0] if len(possible) == 1 else b""


CERTAIN, INSIDE, LAST, USUAL, BRANCH, CLOSE, AFTER = range(7)
"""The buckets: the only allowed token; a token inside a forced text; its last token, which may
merge with what follows; a token after usual whitespace; one of few alternatives; the end of a
string or number; and what is forced after one of these two."""

PRIOR = (0.995, 0.95, 0.7, 0.7, 0.4, 0.15, 0.9)

MOST_BYTES = 40  # Most bytes, or certain tokens, of a text that is grown at once

MOST_BRANCHES = 4

MOST_LINKS = 12  # Tokens in a row that are grown without knowing their texts
Add = Callable[[int, int, int], int]  # Adds a node: from its parent, token and bucket to its number


class Growth:
    """Grows below the nodes of one row."""

    def __init__(
        self, probe: Probe, whitespace: Whitespace, vocabulary: Vocabulary | None, add: Add
    ) -> None:
        self._probe, self._whitespace, self._add = probe, whitespace, add
        self._vocabulary = vocabulary

    def below(self, node: int, text: bytes, *, guesses: bool = True) -> None:
        """Grow below a node at which the probe stands.

        `text` is what the path down to the node adds to the text. With `guesses`, alternatives
        follow what is certain; without, the node is one of them.
        """
        moved = 0
        for find in (self._certain, self._text):
            for token, bucket in find(text):
                if not self._probe.advance(token):
                    self._probe.back(moved)
                    return
                moved, text = moved + 1, text + self._bytes(token)
                is_after = not guesses and bucket != CERTAIN
                node = self._add(node, token, AFTER if is_after else bucket)
        if guesses and not self._probe.grammar.ended():
            self._guess(node, text)
        self._probe.back(moved)

    def _bytes(self, token: int) -> bytes:
        return b"" if self._vocabulary is None else self._vocabulary.texts[token]

    def _certain(self, text: bytes) -> list[tuple[int, int]]:
        return [(token, CERTAIN) for token in self._probe.forced_tokens(MOST_BYTES)]

    def _text(self, before: bytes) -> list[tuple[int, int]]:
        text, certain = self._following(before)
        tokens, end = [], 0
        for token in self._encoded(text):
            end += len(self._bytes(token))
            bucket = INSIDE if end < certain else LAST if end == certain else USUAL
            tokens.append((token, bucket))
        return tokens

    def _encoded(self, text: bytes) -> list[int]:
        return [] if self._vocabulary is None else self._vocabulary.encode(text)

    def _following(self, before: bytes) -> tuple[bytes, int]:
        probe, text, certain, is_certain, moved = self._probe, b"", 0, True, 0
        while self._vocabulary is not None and len(text) < MOST_BYTES and not probe.grammar.ended():
            piece = probe.forced_text(MOST_BYTES - len(text))
            if not piece:
                is_certain = False
                piece = self._spaced(before + text)
            steps = probe.advance_text(piece) if piece else 0
            if not steps:
                break
            moved, text = moved + steps, text + piece
            certain = len(text) if is_certain else certain
        probe.back(moved)
        return text, certain

    def _spaced(self, before: bytes) -> bytes:
        """Return the only structural character that may follow, after the usual whitespace."""
        char = self._probe.only_structure()
        spaced = char and self._whitespace.before(char[0], before) + char
        return spaced if spaced == char or self._probe.allows(spaced) else char

    def _guess(self, node: int, text: bytes) -> None:
        """Grow alternatives: a value that ends, or the few ways on."""
        if self._vocabulary is None:
            self._links(node)
        elif self._probe.is_free():
            self._close(node, text, b'"')
        elif self._probe.is_number():
            self._close(node, text, *(bytes([char]) for char in b",}]"))
        else:
            self._branch(node, text, self._vocabulary)

    def _branch(self, node: int, text: bytes, vocabulary: Vocabulary) -> None:
        few = vocabulary.longest(self._probe.few_allowed() or [])
        bucket = INSIDE if len(few) == 1 else BRANCH
        for token in few if len(few) <= MOST_BRANCHES else ():
            if self._probe.advance(token):
                child = self._add(node, token, bucket)
                self.below(child, text + self._bytes(token), guesses=False)
                self._probe.back(1)

    def _links(self, node: int) -> None:
        """Follow the highest of few tokens again and again: of `n`, `na`, `name` mostly `name`."""
        moved = 0
        while moved < MOST_LINKS and (few := self._probe.few_allowed()):
            token = max(few)
            if not self._probe.advance(token):
                break
            node, moved = self._add(node, token, BRANCH if len(few) > 1 else CERTAIN), moved + 1
        self._probe.back(moved)

    def _close(self, node: int, before: bytes, *closing: bytes) -> None:
        """End the value here: one of the closing characters, and what follows from it."""
        probe = self._probe
        char = next((each for each in closing if probe.allows(each)), b"")
        steps = probe.advance_text(char) if char else 0
        is_value = steps > 0 and not probe.is_free()  # free text continues after a quote
        text = char + self._following(before + char)[0] if is_value else b""
        probe.back(steps)
        moved, bucket = 0, CLOSE
        for token in self._encoded(text):
            if not probe.advance(token):
                break
            moved, node, bucket = moved + 1, self._add(node, token, bucket), AFTER
        probe.back(moved)


LIKELY = 0.02  # Least probability of a path below which something is grown

OPERATIONS = 24
"""Operations of the grammar per node of the draft after which nothing more is grown. Each takes 1
to 5 us, so the refinement takes far less time than a forward."""


class Refinement(RowDraft):
    """A row's nodes while they are pruned and grown, scored by their chance after a parent."""

    def __init__(self, tree: DraftTree, row: int, source: int, rates: np.ndarray) -> None:
        """Begin with the nodes of a row; the drafter is number `source`, with `rates` by bucket."""
        super().__init__()
        nodes, evidence = tree.row(row), tree.evidence
        assert evidence is not None
        self._source, self._rates = source, rates.tolist()
        self.entries: list[list[tuple[int, int]]] = []  # a source and a bucket each
        self._given: dict[int, list[int]] = {}  # the nodes to check below each node
        parents = tree.parents[nodes]
        paths = np.append(tree.score[nodes], 1.0)  # the last one is the root's
        chances = (paths[:-1] / paths[parents].clip(min=1e-9)).clip(max=1.0)
        fields = tree.token_ids[nodes].tolist(), parents.tolist(), chances.tolist()
        for at, (token, parent, chance) in enumerate(zip(*fields, strict=True), nodes.start):
            node = self.child(parent, token, score=chance)
            self._given.setdefault(parent, []).append(node)
            own = slice(evidence.offsets[at], evidence.offsets[at + 1])
            pairs = zip(evidence.source[own].tolist(), evidence.bucket[own].tolist(), strict=True)
            self.entries.append(list(pairs))

    def add(self, parent: int, token: int, bucket: int) -> int:
        """Add a node of the grammar, or count both sources if another one proposes the same."""
        rate, entry = self._rates[bucket], (self._source, bucket)
        node = self.child(parent, token, score=rate)
        if node == len(self.entries):
            self.entries.append([entry])
        elif entry not in self.entries[node]:
            self.scores[node] = 1 - (1 - self.scores[node]) * (1 - rate)
            self.entries[node].append(entry)
        return node

    def run(
        self, probe: Probe, whitespace: Whitespace, vocabulary: Vocabulary | None, max_nodes: int
    ) -> None:
        """Prune and grow; the probe stands after the last token, and does so again afterwards."""
        growth = Growth(probe, whitespace, vocabulary, self.add)
        texts: Sequence[bytes] = () if vocabulary is None else vocabulary.texts
        most = OPERATIONS * max_nodes

        def visit(node: int, text: bytes, chance: float) -> None:
            if chance > LIKELY and probe.operations < most:
                growth.below(node, text)
            for child in self._given.get(node, ()):
                token = self.tokens[child]
                if probe.advance(token):
                    longer = text + texts[token] if texts else b""
                    visit(child, longer, chance * self.scores[child])
                    probe.back(1)
                else:
                    self.scores[child] = 0.0

        visit(ROOT, b"", 1.0)

    def best(self, max_nodes: int, max_depth: int) -> tuple[list[int], list[int], list[float]]:
        """Return the likeliest nodes, parents first, with their parents and path chances."""
        chances: list[float] = []
        for parent, score in zip(self.parents, self.scores, strict=True):
            chances.append(score if parent == ROOT else chances[parent] * score)
        allowed = [n for n, chance in enumerate(chances) if chance and self.depths[n] <= max_depth]
        # The sort is stable, and a parent has a lower number than its children.
        order = sorted(allowed, key=lambda node: -chances[node])[:max_nodes]
        places = {ROOT: ROOT} | {node: place for place, node in enumerate(order)}
        parents = [places[self.parents[node]] for node in order]
        return order, parents, [chances[node] for node in order]


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

    It proposes nothing alone: forced text often begins where another source's guess ends.
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
