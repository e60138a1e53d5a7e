"""The message of a step: what one process decided, as an array of a fixed shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.rows import Rows

_HEAD = 6
"""Numbers of a row before its tokens: broken off, finished, text, emitted, accepted, drafted."""


@dataclass(frozen=True, slots=True)
class StepMessage:
    """A verdict and the draft of the next step.

    Attributes:
        tokens: Emitted tokens by row.
        paths: Accepted nodes by row.
        finished: Rows whose text has ended, [rows] bool.
        num_text: Tokens of each row's text, [rows].
        draft: The draft that the next step verifies.
    """

    tokens: list[list[int]]
    paths: list[list[int]]
    finished: np.ndarray
    num_text: np.ndarray
    draft: DraftTree


def shape(num_rows: int, most_nodes: int) -> tuple[int, int]:
    """Return the shape of all messages of a call."""
    return num_rows, _HEAD + 1 + 4 * most_nodes


def packed(rows: Rows, verdict: Verdict, draft: DraftTree, most_nodes: int) -> np.ndarray:
    """Return a message, [rows, numbers] int32.

    Args:
        rows: The texts, including the verdict's tokens.
        verdict: What was decided.
        draft: The draft of the next step.
        most_nodes: Most nodes that a row's draft can have.
    """
    assert max(draft.max_nodes, int(verdict.num_accepted.max(initial=0))) <= most_nodes
    out = np.zeros(shape(rows.num_rows, most_nodes), np.int32)
    num_drafted = np.diff(draft.row_offsets)
    out[:, 1], out[:, 2] = verdict.finished, rows.num_text
    out[:, 3], out[:, 4], out[:, 5] = verdict.num_emitted, verdict.num_accepted, num_drafted
    for row in range(rows.num_rows):
        nodes = draft.row(row)
        decided = verdict.emitted(row), verdict.accepted(row)
        drafted = draft.token_ids[nodes], draft.parents[nodes]
        for field, numbers in zip(_fields(out[row]), decided + drafted, strict=True):
            field[: len(numbers)] = numbers
    return out


def broken_off(num_rows: int, most_nodes: int) -> np.ndarray:
    """Return the message that announces the end of all messages."""
    out = np.zeros(shape(num_rows, most_nodes), np.int32)
    out[:, 0] = 1
    return out


def unpacked(message: np.ndarray) -> StepMessage | None:
    """Read a message, [rows, numbers]; None where it announces the end of all messages."""
    if message[0, 0]:
        return None
    tokens: list[list[int]] = []
    paths: list[list[int]] = []
    drafts: list[tuple[list[int], list[int]]] = []
    for numbers in message:
        num_emitted, num_accepted, num_drafted = numbers[3:_HEAD].tolist()
        emitted, path, ids, parents = _fields(numbers)
        tokens.append(emitted[:num_emitted].tolist())
        paths.append(path[:num_accepted].tolist())
        drafts.append((ids[:num_drafted].tolist(), parents[:num_drafted].tolist()))
    finished, num_text = message[:, 1].astype(bool), message[:, 2].astype(np.int64)
    return StepMessage(tokens, paths, finished, num_text, DraftTree.from_rows(drafts))


def _fields(numbers: np.ndarray) -> Iterator[np.ndarray]:
    """Yield a row's fields for tokens, path, and the draft's tokens and parents, as views."""
    most_nodes = (len(numbers) - _HEAD - 1) // 4
    first = _HEAD
    for length in (1 + most_nodes, most_nodes, most_nodes, most_nodes):
        yield numbers[first : first + length]
        first += length
