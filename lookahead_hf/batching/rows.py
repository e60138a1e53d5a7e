"""Rows that are taken by one text after another."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.rows import Rows


class RefilledRows(Rows):
    """Texts without padding, each a batch of one row that shares its counts with all others.

    A row without a text counts as finished, and shows one token.

    Attributes:
        texts: The text of every row, as a batch of its own.
        most_new: Most tokens that each row may emit, [rows] int64.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows, self.encoder_ids = num_rows, None
        self.num_emitted = np.zeros(num_rows, np.int64)
        self.most_new = np.zeros(num_rows, np.int64)
        self.finished = np.ones(num_rows, bool)
        self.texts = [Rows(np.zeros((1, 1), np.int64)) for _ in range(num_rows)]
        for row in range(num_rows):
            self.free(row)

    def take(self, row: int, prompt_ids: np.ndarray, most_new: int) -> None:
        """Begin another text in a row, with a prompt, [columns] int64, and so many new tokens."""
        self._put(row, Rows(prompt_ids[None]), most_new)

    def free(self, row: int) -> None:
        """Let go of the text of a row."""
        self._put(row, Rows(np.zeros((1, 1), np.int64)), 0)
        self.finished[row] = True

    def _put(self, row: int, text: Rows, most_new: int) -> None:
        here = slice(row, row + 1)
        self.num_emitted[row], self.finished[row], self.most_new[row] = 0, False, most_new
        # Views: what the text counts is counted here, too.
        text.num_emitted, text.finished = self.num_emitted[here], self.finished[here]
        self.texts[row] = text

    @property
    def prompt_columns(self) -> int:
        """Columns of the longest prompt."""
        return max(text.prompt_columns for text in self.texts)

    def context(self, row: int) -> np.ndarray:
        return self.texts[row].context(0)

    def last_two(self, dropped: np.ndarray | None = None) -> np.ndarray:
        fewer = np.zeros(self.num_rows, np.int64) if dropped is None else dropped
        return np.concatenate(
            [text.last_two(fewer[row : row + 1]) for row, text in enumerate(self.texts)]
        )

    def prompt_length(self, row: int) -> int:
        return self.texts[row].prompt_length(0)

    def ids(self, row: int) -> np.ndarray:
        return self.texts[row].ids(0)

    def emitted(self, row: int) -> np.ndarray:
        return self.texts[row].emitted(0)

    def last_token(self, row: int) -> int:
        return self.texts[row].last_token(0)

    @property
    def last_tokens(self) -> np.ndarray:
        return np.array([text.last_token(0) for text in self.texts])

    def emit(self, row: int, token_id: int) -> None:
        self.texts[row].emit(0, token_id)

    def rewrite(self, row: int, ids: torch.Tensor) -> None:
        self.texts[row].rewrite(0, ids)

    def end(self, ended: int | np.ndarray) -> None:
        for row in np.atleast_1d(np.arange(self.num_rows)[ended]).tolist():
            self.texts[row].end(0)

    @property
    def num_text(self) -> np.ndarray:
        return self.num_emitted  # no pads follow a text

    @property
    def num_fed(self) -> np.ndarray:
        return np.array([len(text.context(0)) - 1 for text in self.texts])
