"""The scores, logits, hidden states and attentions that a caller asked for."""

from __future__ import annotations

from typing import Any

import torch

Layers = tuple[torch.Tensor, ...]

_STATE_ROWS, _WEIGHT_ROWS = -3, -4
"""The axis of the rows: states are [..., rows, tokens, hidden], since Gemma 3n keeps several, and
attentions [..., rows, heads, tokens, columns]."""


class RequestedOutputs:
    """Scores, logits, hidden states and attentions of every emitted token, as plain returns them.

    Rows advance by different counts, so everything is kept by row and put together at the end. The
    names are those of forwards and `generate`; with an encoder, those of its decoder.

    Attributes:
        chooses: Whether the scores or logits behind each choice are kept.
        observes: Whether hidden states or attentions are kept.
    """

    def __init__(
        self, generation_config: Any, num_rows: int, encoder_outputs: Any | None = None
    ) -> None:
        """Read from a generation config what to keep.

        Args:
            generation_config: As prepared by `generate`.
            num_rows: Rows of the batch.
            encoder_outputs: The encoder's outputs, None for a model without an encoder.
        """
        c = generation_config
        returned = bool(c.return_dict_in_generate)
        states = returned and bool(c.output_hidden_states)
        weights = returned and bool(c.output_attentions)
        prefix = "" if encoder_outputs is None else "decoder_"
        self._states, self._weights = f"{prefix}hidden_states", f"{prefix}attentions"
        chosen = {"scores": returned and c.output_scores, "logits": returned and c.output_logits}
        observed = {self._states: states, self._weights: weights}
        self._encoder: dict[str, Any] = {}
        if encoder_outputs is not None:
            observed["cross_attentions"] = weights
            if states:
                self._encoder["encoder_hidden_states"] = encoder_outputs.get("hidden_states")
            if weights:
                self._encoder["encoder_attentions"] = encoder_outputs.get("attentions")
        self._chosen: dict[str, list[list[torch.Tensor]]] = {
            name: [[] for _ in range(num_rows)] for name, wanted in chosen.items() if wanted
        }
        self._joined: dict[str, list[torch.Tensor]] = {name: [] for name in self._chosen}
        self._prefill: dict[str, Layers | None] = {}
        self._observed: dict[str, list[list[Layers | None]]] = {
            name: [[] for _ in range(num_rows)] for name, wanted in observed.items() if wanted
        }
        self.chooses, self.observes = bool(self._chosen), bool(self._observed)

    def __bool__(self) -> bool:
        return self.chooses or self.observes

    def scores_so_far(self) -> tuple[torch.Tensor, ...] | None:
        """Return the `scores` that plain passes to stopping criteria, for rows in lockstep."""
        return self._columns("scores") if "scores" in self._chosen else None

    def choose(self, row: int, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Keep what a row's token is chosen by: processed scores and logits, [vocab] float32."""
        for name, value in (("scores", scores), ("logits", logits)):
            if name in self._chosen:
                self._chosen[name][row].append(value)

    def prefill(self, outputs: Any) -> None:
        """Keep the requested outputs of the prompt's forward."""
        self._prefill = {name: getattr(outputs, name, None) for name in self._observed}

    def num_attending(self, outputs: Any) -> int:
        """Return the number of layers whose attentions a forward shows."""
        return len(getattr(outputs, self._weights, None) or ())

    def observe(
        self,
        row: int,
        tokens: list[int],
        outputs: Any,
        slots: list[list[torch.Tensor | None]],
    ) -> None:
        """Keep a forward's requested outputs for the tokens that a row keeps.

        Args:
            row: The row.
            tokens: Places of these tokens in the block, root first.
            outputs: The forward's outputs.
            slots: By token and layer of the attentions, the slots of the columns in plain's cache,
                -1 for none; None for a layer that does not attend to the text.
        """
        for name, rows in self._observed.items():
            layers = getattr(outputs, name)
            for token, shown in zip(tokens, slots, strict=True):
                rows[row].append(self._entry(name, layers, row, token, shown))

    def _entry(
        self, name: str, layers: Any, row: int, token: int, slots: list[torch.Tensor | None]
    ) -> Any:
        """Return a token's entry of an output, layer by layer; SDPA returns attentions as ()."""
        if not layers:
            return layers
        at = slice(token, token + 1)
        if name == self._states:
            return tuple(states[..., row, at, :].clone() for states in layers)
        each = [None if shown is None else shown[..., row, :, at, :] for shown in layers]
        if name == self._weights:
            return tuple(_by_column(*pair) for pair in zip(each, slots, strict=True))
        return tuple(None if shown is None else shown.clone() for shown in each)

    def fields(self, num_columns: int) -> dict[str, Any]:
        """Return the requested fields of the output, one entry per generated column."""
        chosen = {name: self._columns(name)[:num_columns] for name in self._chosen}
        observed = {name: self._steps(name, num_columns) for name in self._observed}
        return {**chosen, **observed, **self._encoder}

    def _columns(self, name: str) -> tuple[torch.Tensor, ...]:
        """Return the entries of all rows by column, [rows, vocab] each; a column is joined once."""
        rows, joined = self._chosen[name], self._joined[name]
        for column in range(len(joined), min(map(len, rows))):
            whole = torch.stack([row[column] for row in rows])
            for row, entry in zip(rows, whole, strict=True):
                row[column] = entry  # a view, which frees the row's own tensor
            joined.append(whole)
        return tuple(joined)

    def _steps(self, name: str, num_columns: int) -> tuple[Layers | None, ...]:
        """Return the prompt's entry, then one per further column, layer by layer."""
        columns = list(zip(*self._observed[name], strict=False))[: num_columns - 1]
        axis = _STATE_ROWS if name == self._states else _WEIGHT_ROWS
        return (self._prefill[name], *(_by_layer(rows, axis) for rows in columns))


def _by_layer(rows: tuple[Layers | None, ...], axis: int) -> Layers | None:
    """Return a column's entry from those of its rows."""
    given = [row for row in rows if row is not None]
    layers = zip(*given, strict=True)
    stacked = (None if layer[0] is None else torch.stack(layer, axis) for layer in layers)
    return tuple(stacked) if given else None  # type: ignore[arg-type]


def _by_column(weights: Any, slots: torch.Tensor | None) -> Any:
    """Return attention weights over slots, [heads, 1, slots], as [heads, 1, columns]."""
    if weights is None or slots is None:
        return weights if weights is None else weights.clone()
    slots = slots.to(weights.device)
    picked = weights.index_select(-1, slots.clamp(min=0))
    return picked.masked_fill(slots < 0, 0.0)
