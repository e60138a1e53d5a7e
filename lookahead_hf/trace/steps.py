"""The steps of a trace: the nodes of each row's draft, and what the row emitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

MODEL = "model"
"""The origin of a token that no source foresaw: the model itself added it."""

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


def step_from_dict(values: Mapping[str, Any]) -> TraceStep:
    """Build a step from the dict of its fields, which may hold lists instead of tuples."""
    return TraceStep(**{**values, "rows": tuple(map(_row_from_dict, values["rows"]))})


def _row_from_dict(values: Mapping[str, Any]) -> TraceRow:
    nodes = [TraceNode(**{**node, "sources": tuple(node["sources"])}) for node in values["nodes"]]
    fields = {
        name: value if value is None else tuple(value)
        for name, value in values.items()
        if name != "row"
    }
    return TraceRow(**{**fields, "row": values["row"], "nodes": tuple(nodes)})
