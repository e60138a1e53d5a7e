"""Logits within the prompt, for drafting: what the target expected there, in small pieces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lookahead_hf.runner.torch_compile import is_compiled

CHUNK = 64
"""Positions whose logits exist at once."""


class PromptStates:
    """The prompt's last hidden states, kept from its prefill until drafting has read them."""

    def __init__(self, model: Any, keeps: bool = True) -> None:
        """`keeps`: whether there is anything to keep.

        Computing logits from the states runs a part of the model, which may take all of the
        processes that run the model together.
        """
        self._model, self._keeps = model, keeps
        self._states: torch.Tensor | None = None  # [rows, columns of the last forward, hidden]

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Keep what the decoder returns to this thread, if the model has one that is not compiled.

        A hook on a compiled decoder would be compiled with it for good, or be ignored.
        """
        decoder = self._model.get_decoder() if hasattr(self._model, "get_decoder") else None
        if (
            not self._keeps
            or is_compiled(self._model)
            or decoder is None
            or decoder is self._model
            or self._model.get_output_embeddings() is None
        ):
            yield
            return
        thread = threading.get_ident()

        def keep(_: Any, __: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                states = getattr(output, "last_hidden_state", None)
                self._states = states if isinstance(states, torch.Tensor) else None

        handle = decoder.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def drop(self) -> None:
        """Free the states."""
        self._states = None

    @property
    def num_columns(self) -> int:
        """Newest columns of the prompt whose logits can be computed."""
        return 0 if self._states is None else int(self._states.shape[1])

    @torch.no_grad()
    def logits(self, row: int, columns: np.ndarray) -> Iterator[torch.Tensor]:
        """Yield logits after chosen tokens of a row, in pieces of [1, at most 64, vocab].

        The model's scale or cap on its logits is left out, since it keeps their order.

        Args:
            row: The row.
            columns: Ascending indices into the columns that are held, [tokens]; 0 is the oldest.
        """
        assert self._states is not None
        head, states = self._model.get_output_embeddings(), self._states[row]
        for first in range(0, len(columns), CHUNK):
            index = torch.from_numpy(columns[first : first + CHUNK]).to(states.device)
            yield head(states.index_select(0, index))[None]
