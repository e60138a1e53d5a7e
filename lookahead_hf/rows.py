"""The rows of one call: what each was given and what it has emitted."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

EncoderInputs = tuple["torch.Tensor", "torch.Tensor | None"]
"""What each row's encoder was given, [rows, ...], and its mask, [rows, columns]."""


class Rows:
    """Texts of a batch, each with a length of its own; a row may take one text after another.

    Every token has three numbers: its *slot* (place in our cache, attended tokens only), its
    *column* (index in the padded batch that plain `generate` would hold) and its *position* (the
    model's input). For emitted tokens they differ by constants of the row.

    Attributes:
        num_rows: Rows of the batch.
        num_emitted: Tokens emitted so far, [rows] int64; in lockstep the pads of finished rows too.
        finished: Rows without a text or whose text has ended, [rows] bool.
        encoder_ids: Token ids of the encoder's input per row, for models that have one.
        prompt_states: The target's last hidden states of the prompt, [rows, columns, hidden], while
            drafters begin, if one of them needs hidden states; None if they begin later.
    """

    prompt_states: torch.Tensor | None = None

    def __init__(
        self,
        prompt_ids: np.ndarray,  # [rows, columns]
        attended: np.ndarray | None = None,  # [rows, columns] bool; None: every column
        encoder_ids: list[np.ndarray] | None = None,
    ) -> None:
        self.num_rows, width = prompt_ids.shape
        self.encoder_ids = encoder_ids
        self.num_emitted, self._text = np.zeros((2, self.num_rows), np.int64)
        self.finished = np.zeros(self.num_rows, bool)
        self._ids = np.empty((self.num_rows, width + 64), np.int64)
        self._ids[:, :width] = prompt_ids
        self._context = self._ids.copy()  # the same without pads
        self._width = np.full(self.num_rows, width)  # of each row's prompt, in columns
        self._attended, self._prompt_length = attended, self._width.copy()
        if attended is not None:
            self._prompt_length = attended.sum(1)
            for row, length in enumerate(self._prompt_length.tolist()):
                self._context[row, :length] = prompt_ids[row][attended[row]]

    @classmethod
    def without_texts(cls, num_rows: int) -> Rows:
        """Return free rows. A free row counts as finished and shows one token."""
        rows = cls(np.zeros((num_rows, 1), np.int64))
        rows.finished[:] = True
        return rows

    def take(self, row: int, prompt_ids: np.ndarray) -> None:
        """Begin another text in a row, behind an unpadded prompt, [columns] int64."""
        length = len(prompt_ids)
        self._make_room(length)
        self._ids[row, :length] = self._context[row, :length] = prompt_ids
        self._width[row] = self._prompt_length[row] = length
        self.num_emitted[row], self.finished[row] = 0, False

    def free(self, row: int) -> None:
        """Forget the text of a row."""
        self.take(row, np.zeros(1, np.int64))
        self.end(row)

    @property
    def prompt_columns(self) -> int:
        """Columns of the padded prompt, or of the longest one."""
        return int(self._width.max(initial=0))

    @property
    def live(self) -> np.ndarray:
        """Rows whose text goes on, [rows] bool."""
        return ~self.finished

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row's attended prompt and text, [rows] int64."""
        return self._prompt_length + self.num_emitted

    def context(self, row: int) -> np.ndarray:
        """Return a row's attended prompt and emitted tokens, `[length]` int64 (a view)."""
        return self._context[row, : self._prompt_length[row] + self.num_emitted[row]]

    def last_two(self, dropped: np.ndarray | None = None) -> np.ndarray:
        """Return the last two tokens of every row's context, [rows, 2] int64, -1 where it has none.

        The newest `dropped` tokens of each row, [rows], are left out.
        """
        ends = self.lengths - (0 if dropped is None else dropped)
        at = ends[:, None] + np.array([-2, -1])
        tokens: np.ndarray = np.take_along_axis(self._context, np.maximum(at, 0), 1)
        tokens[at < 0] = -1
        return tokens

    def prompt_length(self, row: int) -> int:
        """Return how many attended prompt tokens `context(row)` begins with."""
        return int(self._prompt_length[row])

    def ids(self, row: int) -> np.ndarray:
        """Return the row as plain `generate` holds it, with pads, `[columns]` int64 (a view)."""
        return self._ids[row, : self._width[row] + self.num_emitted[row]]

    def emitted(self, row: int) -> np.ndarray:
        """Return the tokens that the row has emitted, `[num_emitted]` int64 (a view)."""
        return self.ids(row)[self._width[row] :]

    def last_token(self, row: int) -> int:
        """Return the row's newest token, the only one that is not in the cache."""
        return int(self.ids(row)[-1])

    @property
    def last_tokens(self) -> np.ndarray:
        """The newest token of every row, [rows] int64."""
        return self._ids[np.arange(self.num_rows), self._width + self.num_emitted - 1]

    def emit(self, row: int, token_id: int) -> None:
        count = int(self.num_emitted[row])
        column = int(self._width[row]) + count
        self._make_room(column + 1)
        self._ids[row, column] = token_id
        self._context[row, self._prompt_length[row] + count] = token_id
        self.num_emitted[row] = count + 1

    def rewrite(self, row: int, ids: torch.Tensor) -> None:
        """Take over what a processor or criterion has written into a row's ids, [columns].

        Plain's text has it too, while the cache keeps the tokens that were fed.
        """
        new, old = ids.cpu().numpy(), self.ids(row)
        if np.array_equal(new, old):
            return
        old[:] = new
        if self._attended is not None:
            width = self._width[row]
            new = np.concatenate([new[:width][self._attended[row]], new[width:]])
        self._context[row, : len(new)] = new

    def end(self, ended: int | np.ndarray) -> None:
        """End the text of a row, or of rows, [rows] bool, with the last token; pads may follow."""
        self.finished[ended] = True
        self._text[ended] = self.num_emitted[ended]

    @property
    def num_text(self) -> np.ndarray:
        """Tokens of each row's text so far, without the pads behind it, [rows] int64."""
        return np.where(self.finished, self._text, self.num_emitted)

    @property
    def num_columns(self) -> int:
        """Generated columns that plain would hold by now: as many as the slowest row has."""
        going = self.num_emitted[self.live]
        return int(going.min() if len(going) else self.num_emitted.max(initial=0))

    def copied(self) -> Rows:
        """Return a copy of the texts that shares no memory with them."""
        return copy.deepcopy(self)

    def _make_room(self, columns: int) -> None:
        missing = columns - self._ids.shape[1]
        if missing > 0:
            room = np.empty((self.num_rows, max(missing, self._ids.shape[1])), np.int64)
            self._ids = np.concatenate([self._ids, room], 1)
            self._context = np.concatenate([self._context, room], 1)


def rows_of(
    input_ids: torch.Tensor,  # [rows, columns]
    attended: np.ndarray | None,  # [rows, columns] bool
    encoder: EncoderInputs | None,
) -> Rows:
    """Return the rows of a call before its first token."""
    ids, encoder_ids = input_ids.to("cpu").numpy(), _encoder_ids(encoder)
    if attended is not None:
        attended = attended[:, -ids.shape[1] :] if ids.shape[1] else None
    return Rows(ids, attended, encoder_ids)


def _encoder_ids(encoder: EncoderInputs | None) -> list[np.ndarray] | None:
    """Token ids that each row's encoder read, without pads; None where it read no tokens."""
    inputs, mask = encoder or (None, None)
    if inputs is None or inputs.dim() != 2 or inputs.is_floating_point():
        return None
    ids = inputs.to("cpu").numpy()
    if mask is None or mask.dim() != 2:
        return list(ids)
    read = mask.to("cpu").numpy().astype(bool)
    return [ids[row][read[row]] for row in range(len(ids))]
