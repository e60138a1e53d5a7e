"""An assistant during a call: ragged rows in a cache of its own, fed and rolled back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lookahead_hf.call import admission
from lookahead_hf.call.admission import Purpose
from lookahead_hf.call.prepared import prompt_call
from lookahead_hf.draft import DraftTree
from lookahead_hf.fallback import Unserved
from lookahead_hf.model import compat
from lookahead_hf.rows import Rows
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.prefill import prefill

if TYPE_CHECKING:
    from lookahead_hf.rows import EncoderInputs


class AssistantModel:
    """A model that has read every row up to some token, and can forget the newest ones."""

    def __init__(
        self,
        model: Any,
        contexts: Sequence[np.ndarray],
        encoder_inputs: EncoderInputs | None = None,
    ) -> None:
        """Read the rows' first tokens, [tokens] int64 each, in one forward; some may have none.

        Raises:
            ValueError: The model cannot run such rows, or lacks the input of its encoder.
        """
        try:
            self._begin(model, contexts, encoder_inputs)
        except Unserved as error:
            name = type(model).__name__
            raise ValueError(f"{name} cannot be an assistant here: {error.cause}") from error

    def _begin(
        self, model: Any, contexts: Sequence[np.ndarray], encoder_inputs: EncoderInputs | None
    ) -> None:
        admission.admit(model, Purpose.ASSISTANT)
        ids, attended = _left_padded(contexts)
        mask = torch.from_numpy(attended).to(model.device)
        prompt, further = torch.from_numpy(ids).to(model.device), dict[str, Any]()
        if model.config.is_encoder_decoder:
            further = _decoder_arguments(model, encoder_inputs)
        call = prompt_call(model, prompt, mask, **further)
        admission.admit_call(call)
        self._rows = Rows(ids, attended)
        self._runner = Runner(model, len(contexts))
        with torch.no_grad():
            prefill(self._runner, call)

    def read(self, row: int) -> np.ndarray:
        """Return the tokens of a row that were read and kept, [tokens] int64 (a view)."""
        return self._rows.context(row)

    def forget(self, row: int, num_tokens: int) -> None:
        """Forget the newest tokens of a row that were kept; the first ones it read stay."""
        counts = np.zeros(self._rows.num_rows, np.int64)
        counts[row] = num_tokens
        assert num_tokens <= self._rows.num_emitted[row]
        self._rows.num_emitted -= counts
        self._runner.keep(-counts)

    def read_on(self, chains: Sequence[Sequence[int]]) -> torch.Tensor:
        """Read each row's next tokens in one forward; return the logits, [rows, width, vocab].

        Place i follows a row's i-th token.
        """
        for row, chain in enumerate(chains):
            if chain:
                self._rows.emit(row, chain[0])
        draft = DraftTree.from_chains([chain[1:]] for chain in chains)
        with torch.no_grad():
            outputs = self._runner.forward(self._runner.layout(self._rows, draft))
        for row, chain in enumerate(chains):
            for token in chain[1:]:
                self._rows.emit(row, token)
        self._runner.keep(np.array([len(chain) for chain in chains]))
        return outputs.logits


def _left_padded(contexts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and whether they are attended, [rows, longest] each."""
    width = max(map(len, contexts))
    ids = np.zeros((len(contexts), width), np.int64)
    attended = np.zeros((len(contexts), width), bool)
    for row, context in enumerate(contexts):
        ids[row, width - len(context) :] = context
        attended[row, width - len(context) :] = True
    return ids, attended


def _decoder_arguments(model: Any, encoder_inputs: EncoderInputs | None) -> dict[str, Any]:
    """Return the arguments of a decoder that its encoder gives."""
    if encoder_inputs is None:
        raise ValueError("an encoder-decoder model cannot assist a decoder-only model")
    inputs, mask = encoder_inputs
    inputs = inputs.to(model.device, model.dtype if inputs.is_floating_point() else None)
    kwargs: dict[str, Any] = {}
    if mask is not None:
        kwargs["attention_mask"] = mask = mask.to(model.device)
    with torch.no_grad():
        kwargs["encoder_outputs"] = compat.encoded(model, inputs, mask)
    return kwargs
