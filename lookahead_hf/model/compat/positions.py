"""How a decoder positions its tokens: by counting, by a table, by rotation."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from packaging import version
from torch import nn

from lookahead_hf.model.compat.forwards import decoder_names, is_pair, text_config

ROPE_NOTE = "rope_deltas"
"""Attribute in which `generate` keeps, for later calls, how positions differ from columns."""


def counts_positions(model: Any) -> bool:
    """Return whether the decoder counts positions from the length of its cache."""
    names = decoder_names(model)
    return names.positions is None and not names.has_states_alone


def positions_by_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return the positions that `generate` gives to columns, [rows, columns], by their mask."""
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)


def text_positions(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the position ids that `generate` gives to texts without padding, [..., rows, columns].

    `input_ids` are [rows, columns]. Positions with a height and a width have these dimensions
    before the rows. `ROPE_NOTE` stays as it was.
    """
    notes = [vars(module) for module in model.modules() if ROPE_NOTE in vars(module)]
    before = [note[ROPE_NOTE] for note in notes]
    given = {"attention_mask": torch.ones_like(input_ids)}
    try:
        return model._prepare_position_ids_for_generation(input_ids, given)
    finally:
        for note, value in zip(notes, before, strict=True):
            note[ROPE_NOTE] = value


def counted_tables(model: Any) -> list[nn.Module]:
    """Return the modules in which a decoder looks up the positions that it counts."""
    table = getattr(decoder_of(model), "embed_positions", None)
    return [] if table is None or decoder_names(model).columns else [table]


def decoder_of(model: Any) -> Any:
    """Return the decoder alone, without a head.

    Florence-2 returns its encoder and decoder of texts, a pair of models its causal model.
    """
    found = model.get_decoder()
    if is_pair(model):
        return found.get_decoder()
    return getattr(found, "decoder", found) if model.config.is_encoder_decoder else found


def is_computed(table: nn.Module) -> bool:
    """Return whether a table of positions is computed and skips pads."""
    return hasattr(table, "weights")


def _grows(table: nn.Module) -> bool:
    """Return whether a computed table becomes longer on demand."""
    return hasattr(table, "make_weights")


def entries_of_columns(table: Any, columns: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Look up tokens in a table that `is_computed`, [rows, width, dim]; extend it if needed.

    `columns` and `ids` are those of the tokens, [rows, width].
    """
    places = columns + 1 + table.padding_idx
    most = int(places.max()) + 1
    if _grows(table) and most > table.weights.shape[0]:
        table.make_weights(most + table.offset, table.embedding_dim, table.padding_idx)
    places = torch.where(ids == table.padding_idx, table.padding_idx, places)
    return table.weights[places].detach()


def has_relative_bias(module: nn.Module) -> bool:
    """Return whether an attention adds a bias by the distance of two tokens."""
    return bool(getattr(module, "has_relative_attention_bias", False))


def is_windowed_by_slot(module: nn.Module) -> bool:
    """Return whether an attention cuts its window out of a causal matrix, the buffer `bias`."""
    return "bias" in module._buffers and getattr(module, "attention_type", None) == "local"


BLOOM_ALIBI, MPT_ALIBI = "build_alibi_tensor", "build_mpt_alibi_tensor"
"""Methods that make a bias by distance. Bloom's makes it from a mask, by the number of attended
tokens before each one, for every row and head. MPT's makes it for its longest text, ending in 0; it
is sliced to the length of the cache."""


def position_table(model: Any) -> int | None:
    """Return the size of the model's position table; None if positions are unlimited."""
    config = text_config(model)
    if getattr(config, "rope_parameters", None):
        return None
    if counts_positions(model) and any(map(_grows, counted_tables(model))):
        return None
    end = getattr(config, "max_target_positions", None)  # the decoder's own
    return end or getattr(config, "max_position_embeddings", None)


def rope_limits(model: nn.Module) -> dict[str, int]:
    """Return the rope types whose frequencies change with length, and the length from which on."""
    config = text_config(model)
    given = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [each for each in given.values() if isinstance(each, dict)]
    limits = {}
    for parameters in by_layer_type or [given]:
        rope_type = parameters.get("rope_type") or "default"
        if rope_type == "longrope":
            limits[rope_type] = int(parameters["original_max_position_embeddings"])
        elif "dynamic" in rope_type:
            limits[rope_type] = int(config.max_position_embeddings)
    # Some models call fixed frequencies "dynamic" and rename them in their modules.
    return {kind: limits[kind] for kind in limits.keys() & _rope_types(model)} if limits else {}


_SELECTS_LONG_FACTORS = version.parse(transformers.__version__) >= version.parse("5.23")


def reads_lengths(model: nn.Module) -> bool:
    """Return whether a forward reads the longest position back, which no graph can capture.

    Since 5.23, long factors no longer do.
    """
    kinds = set(rope_limits(model))
    return bool(kinds - {"longrope"} if _SELECTS_LONG_FACTORS else kinds)


def _rope_types(model: nn.Module) -> set[str]:
    """Return the rope types that the model's modules use."""
    found = (vars(module).get("rope_type") for module in model.modules())
    each = (kind.values() if isinstance(kind, dict) else [kind] for kind in found if kind)
    return {kind for kinds in each for kind in kinds}
