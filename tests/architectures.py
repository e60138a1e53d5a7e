"""Tiny random models of every causal architecture that transformers knows, as far as they build."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models import _COMMON

MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_MOST_PARAMETERS = 20_000_000

_SMALL = {
    **{"head_dim": 12, "d_model": 48, "num_layers": 4, "num_heads": 4, "ffn_dim": 96},
    **{"n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": 512, "n_inner": 96},
    **{"rotary_dim": 12, "word_embed_proj_dim": 48, "sliding_window": 8, "is_decoder": True},
    **{"decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 96},
    **{"encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 96},
    **{"num_local_experts": 4, "num_experts": 4, "moe_num_experts": 4, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12},
    **{"v_head_dim": 12, "first_k_dense_replace": 1, "tie_word_embeddings": False},
}
"""Sizes by the names that configurations give them."""


def build(model_type: str) -> Any:
    """A tiny model of a type in eval mode; None where these sizes do not make one."""
    try:
        config = _config(model_type)
        with torch.device("meta"):
            shapes = AutoModelForCausalLM.from_config(config)
        if sum(parameter.numel() for parameter in shapes.parameters()) > _MOST_PARAMETERS:
            return None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    except Exception:  # a configuration may object to sizes in any way
        return None
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    model.generation_config.eos_token_id = None
    return model


def _config(model_type: str) -> Any:
    kind = CONFIG_MAPPING[model_type]
    renamed = getattr(kind, "attribute_map", {})
    known = set(inspect.signature(kind.__init__).parameters)
    for base in kind.__mro__:
        known |= set(vars(base).get("__annotations__", {}))
    small = {name: size for name, size in _SMALL.items() if name in known - set(renamed)}
    return kind(**{**_COMMON, **small})
