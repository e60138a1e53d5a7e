"""Virtual tokens that PEFT's prompt and prefix tuning put into the cache before the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lookahead_hf import compat
from lookahead_hf.fallback import FallbackReason, Unserved

_IN_CACHE = frozenset({"PREFIX_TUNING", "CARTRIDGE"})
_AS_EMBEDDINGS = frozenset({"PROMPT_TUNING", "P_TUNING"})


@dataclass(frozen=True, slots=True)
class VirtualTokens:
    """Virtual tokens before a decoder's prompt, a column each, which every row attends.

    If positions are `by_column`, the model gets no position ids: a token's position is its column,
    virtual tokens and pads included.
    """

    count: int = 0
    by_column: bool = False


def of_model(model: Any) -> VirtualTokens:
    """Return the virtual tokens before every prompt of the model, as it is set up now.

    PEFT prepares the inputs of each forward in the model's place. If the cache holds the virtual
    tokens from the start, it adds their number to the positions. If they are embeddings before the
    prompt's own, it leaves positions out. Unserved if inputs are prepared in an unknown way.
    """
    prepare = model.prepare_inputs_for_generation
    if getattr(prepare, "__func__", None) is type(model).prepare_inputs_for_generation:
        return VirtualTokens()
    owner = getattr(prepare, "__self__", prepare)
    config: Any = getattr(owner, "active_peft_config", None)
    kind = str(getattr(getattr(config, "peft_type", None), "value", ""))
    by_peft = type(owner).__module__ == "peft.peft_model"
    if not (by_peft and kind in _IN_CACHE | _AS_EMBEDDINGS):
        raise Unserved(
            FallbackReason.ADAPTER, f"{kind or type(owner).__name__} prepares its inputs"
        )
    if model.config.is_encoder_decoder:  # embeddings come before the encoder's
        return VirtualTokens(int(config.num_virtual_tokens) if kind in _IN_CACHE else 0)
    return VirtualTokens(int(config.num_virtual_tokens), kind in _AS_EMBEDDINGS)


def check(model: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    """Raise Unserved if virtual tokens are combined with something that they may not support."""
    virtual, names = of_model(model), compat.decoder_names(model)
    if not virtual.count:
        return
    cache: Any = compat.given_cache(model_kwargs)
    positions = model_kwargs.get(names.positions or "")
    combined = {
        "chunks": "chunked_attention" in compat.mask_kinds(model),
        "a prompt in chunks": generation_config.prefill_chunk_size is not None,
        "a cache that is not empty": cache.get_seq_length() > 0,
        "a static cache": type(compat.self_attention(cache)) is compat.StaticCache,
        "positions of several kinds": positions is not None and positions.dim() > 2,
        "positions that leave pads out": names.skips_pads
        or (virtual.by_column and names.mask in model_kwargs and compat.counts_by_mask(model)),
    }
    for what, is_there in combined.items():
        if is_there:
            raise Unserved(FallbackReason.ADAPTER, f"virtual tokens and {what}")
