"""transformers' multi-token-prediction layers: loading them and running them on batches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import cache_utils, modeling_layers

from lookahead_hf.model.compat.attention import additive_mask, set_attention_name
from lookahead_hf.model.compat.forwards import text_config

LAST_HIDDEN_STATES = {"output_hidden_states": -1}
"""Requests a forward's last hidden states; before transformers 5.23 it returns all layers'."""

_SERVED = {"full_attention", "sliding_attention"}


def last_hidden_states(outputs: Any) -> torch.Tensor | None:
    """Return the last hidden states of a forward, [rows, width, hidden], or None."""
    states = getattr(outputs, "hidden_states", None)
    return states[-1] if states else None


def load_mtp(model: Any) -> Any:
    """Load the multi-token-prediction layers of a model from its checkpoint.

    Returns an `MtpModel` that serves batches and shares the model's embeddings and output layer.
    ValueError if there are none that this version of transformers can load and this package serves.
    """
    kind: Any = getattr(modeling_layers, "MtpModel", None)
    if not hasattr(kind, "forward_layer"):
        raise ValueError(
            'the drafter "mtp" needs transformers 5.20 or newer, but this is transformers '
            f"{transformers.__version__}: update it, or leave the drafter out"
        )
    name = type(model).__name__
    if not getattr(text_config(model), "num_mtp_layers", None):
        raise ValueError(
            'the drafter "mtp" needs multi-token-prediction layers that transformers knows, but '
            f"the configuration of this {name} has no `num_mtp_layers`: leave the drafter out"
        )
    device = model.get_output_embeddings().weight.device
    try:
        with torch.inference_mode(False):  # later calls may run outside of it
            heads = kind.from_pretrained(model, device_map={"": device})
            if model.config.dtype != model.dtype:  # the model was cast after it was loaded
                heads.layers.to(model.dtype)  # and not what they share with the model
    except Exception as error:
        raise ValueError(
            f"the multi-token-prediction layers of this {name} cannot be loaded from "
            f"{model.config.name_or_path!r}: {type(error).__name__}: {error}"
        ) from error
    return serving_batches(heads, "sdpa" if model._supports_sdpa else "eager")


def serving_batches(heads: Any, attention: str) -> Any:
    """Let an `MtpModel` run on ragged batches, with the caches of `mtp_cache`; return it.

    `attention` is an implementation that takes an additive mask. ValueError if a layer is of
    neither full nor sliding attention.
    """
    kinds = getattr(heads.config, "layer_types", None) or ["full_attention"] * len(heads.layers)
    if unknown := sorted(set(kinds) - _SERVED):
        raise ValueError(
            'the drafter "mtp" serves layers of full and of sliding attention, but this model '
            f"predicts with {', '.join(unknown)}: leave the drafter out"
        )
    windows = [heads.config.sliding_window if kind != "full_attention" else None for kind in kinds]
    set_attention_name(heads.config, attention)
    heads.create_masks_for_mtp_layer = functools.partial(_masks, windows)
    heads.layers.eval()
    return heads


def mtp_cache(num_rows: int, device: torch.device) -> Any:
    """Return an empty cache for `serving_batches`.

    Its attribute `columns`, [rows, columns], says which of a row's hidden states each column of K
    and V stands for, counted from the start of the text, -1 for none.
    """
    cache = cache_utils.MtpCache()
    cache.columns = torch.zeros(num_rows, 0, dtype=torch.int64, device=device)
    return cache


def head_logits(layers: Any, states: torch.Tensor) -> torch.Tensor:
    """Return the logits of states that left a model's own draft layers, on the states' device."""
    return layers._project_to_logits(states).to(states.device)


def crop_mtp_cache(cache: Any, num_columns: int) -> None:
    """Keep the first columns of such a cache; `crop` differs between versions of transformers."""
    cache.columns = cache.columns[:, :num_columns]
    for layer in cache.layers:
        layer.keys, layer.values = (kv[..., :num_columns, :] for kv in (layer.keys, layer.values))


def _masks(
    windows: Sequence[int | None],
    layer: int,
    embedded: torch.Tensor,  # [rows, width, hidden]
    cache: Any,
    position_ids: torch.Tensor,  # [rows, width]
) -> dict[str, torch.Tensor]:
    """Replace `MtpModel.create_masks_for_mtp_layer`: a layer's token is `layer + 1` ahead."""
    query, key = (position_ids - layer - 1)[:, :, None], cache.columns[:, None]
    seen = (key >= 0) & (key <= query)  # [rows, width, columns]
    if (window := windows[layer]) is not None:
        seen &= query - key < window
    return {"attention_mask": additive_mask(seen, embedded.dtype)}
