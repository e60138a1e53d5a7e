"""Scores, logits, hidden states and attentions of every emitted token, as plain returns them."""

from __future__ import annotations

from typing import Any

import torch

Layers = tuple[torch.Tensor, ...]


class RequestedOutputs:
    """What the caller asked to see of each step; nothing else is kept.

    Rows advance by different counts, so everything is kept by row and put together at the end. The
    names are those of forwards and `generate`, for a decoder where the model has an encoder.

    Attributes:
        chooses: Whether the scores or logits behind each choice are kept.
        observes: Whether hidden states or attentions are kept.
    """

    def __init__(
        self, generation_config: Any, num_rows: int, encoder_outputs: Any | None = None
    ) -> None:
        """Read from a prepared generation config what to keep.

        Args:
            generation_config: As prepared by `generate`.
            num_rows: Rows of the batch.
            encoder_outputs: The encoder's outputs, None for a model without an encoder.
        """
        c = generation_config
        returned = bool(c.return_dict_in_generate)
        states = returned and bool(c.output_hidden_states)
        weights = returned and bool(c.output_attentions)
        has_encoder = encoder_outputs is not None
        prefix = "decoder_" if has_encoder else ""
        self._states, self._weights = f"{prefix}hidden_states", f"{prefix}attentions"
        self._observes = {self._states: states, self._weights: weights}
        if has_encoder:
            self._observes["cross_attentions"] = weights
        self._wants = {
            "scores": returned and bool(c.output_scores),
            "logits": returned and bool(c.output_logits),
            **self._observes,
        }
        self._encoder: dict[str, Any] = {}
        if has_encoder and returned:
            found = encoder_outputs.get  # type: ignore[union-attr]
            self._encoder["encoder_hidden_states"] = found("hidden_states") if states else None
            self._encoder["encoder_attentions"] = found("attentions") if weights else None
        self.chooses = self._wants["scores"] or self._wants["logits"]
        self.observes = states or weights
        self._chosen: dict[str, list[list[torch.Tensor]]] = {
            name: [[] for _ in range(num_rows)] for name in ("scores", "logits")
        }
        self._joined: dict[str, list[torch.Tensor]] = {"scores": [], "logits": []}
        self._prefill: dict[str, Layers | None] = {}
        self._observed: dict[str, list[list[Layers | None]]] = {
            name: [[] for _ in range(num_rows)] for name in self._observes
        }

    def __bool__(self) -> bool:
        return self.chooses or self.observes

    def scores_so_far(self) -> tuple[torch.Tensor, ...] | None:
        """Return the `scores` of plain's stopping criteria; for rows that advance together."""
        return self._columns("scores") if self._wants["scores"] else None

    def choose(self, row: int, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Keep the scores by which a row's token is chosen.

        Args:
            row: The row.
            scores: Processed, [vocab] float32.
            logits: The target's, [vocab] float32.
        """
        for name, value in (("scores", scores), ("logits", logits)):
            if self._wants[name]:
                self._chosen[name][row].append(value)

    def prefill(self, outputs: Any) -> None:
        """Keep the requested outputs of the prompt's forward."""
        for name, wanted in self._observes.items():
            if wanted:
                self._prefill[name] = getattr(outputs, name, None)

    def observe(
        self,
        row: int,
        tokens: list[int],
        outputs: Any,
        slots: list[list[torch.Tensor]],
    ) -> None:
        """Keep a forward's requested outputs for the tokens that a row keeps.

        Args:
            row: The row.
            tokens: Their places in the block, root first.
            outputs: The forward's outputs.
            slots: For each token and each layer, the slots of the columns in plain's cache, -1 for
                none.
        """
        if self._wants[self._states]:
            for token in tokens:
                each = getattr(outputs, self._states)
                states = tuple(h[row, token : token + 1].clone() for h in each)
                self._observed[self._states][row].append(states)
        if self._wants[self._weights]:
            for token, shown in zip(tokens, slots, strict=True):
                weights = _weights(getattr(outputs, self._weights), row, token, shown)
                self._observed[self._weights][row].append(weights)
        if self._wants.get("cross_attentions"):
            for token in tokens:
                weights = _over_encoder(outputs.cross_attentions, row, token)
                self._observed["cross_attentions"][row].append(weights)

    def fields(self, num_columns: int) -> dict[str, Any]:
        """Return the output's fields, one entry per generated column; None if not requested."""
        out: dict[str, Any] = {}
        for name in ("scores", "logits"):
            out[name] = self._columns(name)[:num_columns] if self._wants[name] else None
        for name, wanted in self._observes.items():
            out[name] = self._steps(name, num_columns) if wanted else None
        return out | self._encoder

    def _columns(self, name: str) -> tuple[torch.Tensor, ...]:
        """Entries of all rows by column, [rows, vocab] each; a column is put together once."""
        rows, joined = self._chosen[name], self._joined[name]
        for column in range(len(joined), min(map(len, rows))):
            whole = torch.stack([row[column] for row in rows])
            for row, entry in zip(rows, whole, strict=True):
                row[column] = entry  # a view, which frees the row's own tensor
            joined.append(whole)
        return tuple(joined)

    def _steps(self, name: str, num_columns: int) -> tuple[Layers | None, ...]:
        """The prompt's entry, then one per further column, layer by layer."""
        columns = list(zip(*self._observed[name], strict=False))[: num_columns - 1]
        return (self._prefill[name], *map(_by_layer, columns))


def _by_layer(rows: tuple[Layers | None, ...]) -> Layers | None:
    """A column's entry, put together from its rows' entries."""
    layers = [row for row in rows if row is not None]
    return tuple(map(_stacked, zip(*layers, strict=True))) if layers else None


def _weights(attentions: Any, row: int, token: int, slots: list[torch.Tensor]) -> Layers | None:
    """One token's attention weights layer by layer; SDPA returns none, as (), for any of them."""
    if not attentions:
        return attentions
    layers = zip(attentions, slots, strict=True)
    return tuple(_by_column(weights, row, token, held) for weights, held in layers)


def _over_encoder(attentions: Any, row: int, token: int) -> Any:
    """One token's weights over the encoder's columns, [heads, 1, columns], layer by layer."""
    if not attentions:
        return attentions
    at = row, slice(None), slice(token, token + 1)
    return tuple(None if weights is None else weights[at].clone() for weights in attentions)


def _by_column(weights: Any, row: int, token: int, slots: torch.Tensor) -> Any:
    """Attention weights over slots, [rows, heads, width, slots], as [heads, 1, columns]."""
    if weights is None:
        return None
    over_slots = weights[row, :, token : token + 1]
    slots = slots.to(over_slots.device)
    picked = over_slots.index_select(-1, slots.clamp(min=0))
    return picked.masked_fill(slots < 0, 0.0)


def _stacked(rows: tuple[Any, ...]) -> Any:
    return None if rows[0] is None else torch.stack(rows)
