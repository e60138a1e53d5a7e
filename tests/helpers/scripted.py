"""Drafters that know plain's text and draft from it as a test asks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from lookahead_hf import SpeculativeConfig
from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting import Drafter
from lookahead_hf.rows import Rows
from tests.helpers.models import VOCAB

Tree = tuple[list[int], list[int]]  # Token ids and parents of one row


class Scripted(Drafter):
    """Drafts `script(what plain emits from here)` for every live row."""

    name = "scripted"

    def __init__(
        self, truths: Sequence[Sequence[int]], script: Callable[[list[int]], Tree]
    ) -> None:
        self.truths = [list(truth) for truth in truths]
        self.script = script

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        trees: list[Tree] = []
        for row in range(rows.num_rows):
            rest = self.truths[row][int(rows.num_emitted[row]) :]
            trees.append(([], []) if rows.finished[row] else self.script(rest))
        return DraftTree.from_rows(trees)


def chain(tokens: Sequence[int]) -> Tree:
    """A chain of draft tokens."""
    return list(tokens), list(range(-1, len(tokens) - 1))


def right(length: int) -> Callable[[list[int]], Tree]:
    """The next `length` tokens, all right."""
    return lambda rest: chain(rest[:length])


def wrong(rest: list[int]) -> Tree:
    """A chain that is wrong from its first token on."""
    return chain([(token + 1) % VOCAB for token in rest[:5]])


def empty(rest: list[int]) -> Tree:
    """No draft at all."""
    return [], []


def second_child_right(rest: list[int]) -> Tree:
    """Two children of the last token: the first wrong, the second right, each with a child."""
    if len(rest) < 2:
        return [], []
    other = (rest[0] + 1) % VOCAB
    return [other, rest[0], 5, rest[1]], [-1, -1, 0, 1]


class RandomTrees:
    """Random trees around the right path, which is in them up to a random depth."""

    def __init__(self, seed: int = 0, hit: float = 0.85, depth: int = 6) -> None:
        self.random, self.hit, self.depth = random.Random(seed), hit, depth

    def __call__(self, rest: list[int]) -> Tree:
        tokens: list[int] = []
        parents: list[int] = []
        at, on_path = -1, True
        for level in range(self.random.randint(0, self.depth)):
            children = [self.random.randrange(VOCAB) for _ in range(self.random.randint(0, 2))]
            hit = on_path and level < len(rest) and self.random.random() < self.hit
            if hit:
                children.insert(self.random.randint(0, len(children)), rest[level])
            children = list(dict.fromkeys(children))
            if not children:
                break
            base = len(tokens)
            tokens += children
            parents += [at] * len(children)
            on_path = hit
            step = children.index(rest[level]) if hit else self.random.randrange(len(children))
            at = base + step
        return tokens, parents


class RandomChains:
    """Chains that follow the right path for a random number of tokens and then leave it."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)

    def __call__(self, rest: list[int]) -> Tree:
        length = self.random.choice((0, 1, 3, 5, 7))
        right = self.random.randint(0, length + 2)
        tokens = enumerate(rest[:length])
        return chain([token if at < right else (token + 1) % VOCAB for at, token in tokens])


def scripted(
    truths: Sequence[Sequence[int]], script: Callable[[list[int]], Tree]
) -> SpeculativeConfig:
    """A configuration that drafts by a script, whatever it costs."""
    return SpeculativeConfig(drafters=(Scripted(truths, script),), budget=64)


def continuations(output: torch.Tensor, columns: int) -> list[list[int]]:
    """What a batch generated behind its first `columns` columns."""
    return [row.tolist() for row in output[:, columns:]]
