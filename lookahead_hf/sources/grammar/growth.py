"""Grows drafts that a grammar forces, and refines those of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lookahead_hf.draft import ROOT, DraftTree, RowDraft
from lookahead_hf.sources.grammar.vocabulary import Probe, Vocabulary, Whitespace

CERTAIN, INSIDE, LAST, USUAL, BRANCH, CLOSE, AFTER = range(7)
"""The buckets: the only allowed token; a token inside a forced text; its last token, which may
merge with what follows; a token after usual whitespace; one of few alternatives; the end of a
string or number; and what is forced after one of these two."""

PRIOR = (0.995, 0.95, 0.7, 0.7, 0.4, 0.15, 0.9)

MOST_BYTES = 40
"""Most bytes, or certain tokens, of a text that is grown at once."""

MOST_BRANCHES = 4

MOST_LINKS = 12
"""Tokens in a row that are grown without knowing their texts."""

Add = Callable[[int, int, int], int]
"""Adds a node: from its parent, token and bucket to its number."""


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
        """Return the usual tokens of the text that follows, with their buckets."""
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
        """Return the text that follows, with usual whitespace, and its number of certain bytes."""
        probe, text, certain, is_certain, moved = self._probe, b"", 0, True, 0
        while self._vocabulary is not None and len(text) < MOST_BYTES:
            if probe.grammar.ended():
                break
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


LIKELY = 0.02
"""Least probability of a path below which something is grown."""

OPERATIONS = 24
"""Operations of the grammar per node of the draft after which nothing more is grown. Each takes 1
to 5 us, so the refinement takes far less time than a forward."""

Entry = tuple[int, int]
"""A source and a bucket."""


class Refinement(RowDraft):
    """The nodes of one row while they are pruned and grown.

    The score of a node is its chance after its parent, 0 if the grammar forbids it.
    """

    def __init__(self, tree: DraftTree, row: int, source: int, rates: np.ndarray) -> None:
        """Begin with the nodes of a row; the drafter is number `source`, with `rates` by bucket."""
        super().__init__()
        nodes, evidence = tree.row(row), tree.evidence
        assert evidence is not None
        self._source, self._rates = source, rates.tolist()
        self.entries: list[list[Entry]] = []
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
