"""SuffixDecoding (arXiv 2411.04975): continuations of the matched suffix, weighed by frequency.

The authors keep a suffix tree; this code groups the occurrences themselves, which yields the same
counts.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np
from replay import Contender, Seen

from lookahead_hf.draft import ROOT, DraftTree

END = -1
"""Separates two texts; it is never matched and never drafted."""


class Occurrences:
    """Texts with the places that follow each token."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: defaultdict[int, list[int]] = defaultdict(list)

    def extend(self, tokens: list[int]) -> None:
        """Append to the newest text."""
        for token in tokens:
            self._tokens.append(token)
            self._after[token].append(len(self._tokens))

    def matches(self, context: list[int]) -> Iterator[tuple[int, list[int]]]:
        """Yield the places that follow the last 1, 2, 3 ... tokens of a context, until none do."""
        places = self._after.get(context[-1], [])
        for length in range(1, len(context)):
            if not places:
                return
            yield length, places
            wanted = context[-length - 1]
            places = [p for p in places if p > length and self._tokens[p - length - 1] == wanted]

    def continued(self, places: list[int]) -> dict[int, list[int]]:
        """Return the next places by the token in between; a place at a text's end has none."""
        further: defaultdict[int, list[int]] = defaultdict(list)
        for place in places:
            if place < len(self._tokens) and self._tokens[place] != END:
                further[self._tokens[place]].append(place + 1)
        return further


class Draft:
    """Tokens with parents, and the sum of their estimated probabilities."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.score = 0.0

    def add(self, token: int, parent: int, prob: float) -> int:
        """Append a token and return its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.score += prob
        return len(self.tokens) - 1


class SuffixDecoding(Contender):
    """Drafts at most `factor` times the match, from the match length with the highest score.

    One index holds prompt and output, another the outputs of all texts so far; the draft with the
    higher score wins. vLLM runs the chain with factor 1 and depth 24; the tree and a factor of up
    to 4 are from the paper, depth 64 is from the authors' library.
    """

    def __init__(
        self, tree: bool = False, factor: float = 1.0, depth: int = 24, least_prob: float = 0.1
    ) -> None:
        self.name = "SuffixDecoding tree" if tree else "SuffixDecoding"
        self.settings = f"factor {factor:g}, depth {depth}, kept from text to text"
        self._tree, self._factor, self._depth, self._least_prob = tree, factor, depth, least_prob
        self._outputs = Occurrences()

    def begin(self, tokens: np.ndarray, prompt: Seen) -> None:
        self._own = Occurrences()
        self._own.extend(tokens.tolist())
        self._context = tokens[-self._depth :].tolist()
        self._outputs.extend([END, int(tokens[-1])])

    def propose(self) -> DraftTree:
        draft = self._best_draft(self._own)
        other = self._best_draft(self._outputs)
        best = other if other.score > draft.score else draft
        return DraftTree.from_rows([(best.tokens, best.parents)])

    def observe(self, draft: DraftTree, path: list[int], emitted: np.ndarray, seen: Seen) -> None:
        for texts in (self._own, self._outputs):
            texts.extend(emitted.tolist())
        self._context = [*self._context, *emitted.tolist()][-self._depth :]

    def _best_draft(self, texts: Occurrences) -> Draft:
        """Return the draft with the highest score over all match lengths; the longest wins ties."""
        best = Draft()
        grow = self._grow_tree if self._tree else self._grow_chain
        for length, places in texts.matches(self._context):
            room = min(int(self._factor * length + 1e-6), self._depth - length)
            draft = grow(texts, places, room)
            if draft.score >= best.score:
                best = draft
        return best

    def _grow_chain(self, texts: Occurrences, places: list[int], room: int) -> Draft:
        draft, prob = Draft(), 1.0
        while len(draft.tokens) < room:
            further = texts.continued(places)
            if not further:
                break
            token, kept = max(further.items(), key=lambda item: len(item[1]))
            prob *= len(kept) / len(places)
            if prob < self._least_prob:
                break
            draft.add(token, len(draft.tokens) - 1, prob)
            places = kept
        return draft

    def _grow_tree(self, texts: Occurrences, places: list[int], room: int) -> Draft:
        draft = Draft()
        heap: list[tuple[float, int, int, int, list[int]]] = []
        number = Counter[str]()

        def offer(parent: int, prob: float, places: list[int]) -> None:
            for token, kept in texts.continued(places).items():
                own = prob * len(kept) / len(places)
                if own >= self._least_prob:
                    number["offered"] += 1
                    heapq.heappush(heap, (-own, number["offered"], token, parent, kept))

        offer(ROOT, 1.0, places)
        while heap and len(draft.tokens) < room:
            negative, _, token, parent, kept = heapq.heappop(heap)
            offer(draft.add(token, parent, -negative), -negative, kept)
        return draft
