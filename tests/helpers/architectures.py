"""Tiny random models of every causal architecture of transformers that can be built tiny."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.helpers.models import VOCAB, built

MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_MOST_PARAMETERS = 30_000_000

_NAMES = {
    VOCAB: "vocab_size n_token vocab_size_per_layer_input",
    32: "hidden_size n_embd d_model embedding_size emb_dim attention_hidden_size "
    "backbone_hidden_size lru_width",
    48: "intermediate_size n_inner n_inner_ dff d_inner ffn_dim ffn_hidden_size dim_ff "
    "feed_forward_size ffn_intermediate_size decoder_ffn_dim encoder_ffn_dim",
    8: "head_dim kv_channels d_head dim_head v_head_dim qk_nope_head_dim qk_rope_head_dim "
    "rotary_dim index_head_dim linear_key_head_dim linear_value_head_dim query_pre_attn_scalar "
    "hidden_size_per_layer_input sliding_window attention_window attention_chunk_size block_size "
    "patch_size mamba_d_state mamba_n_heads mamba_d_head state_size",
    2: "num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers eos_token_id "
    "num_key_value_heads num_kv_heads num_experts_per_tok moe_topk moe_k top_k_experts "
    "moe_router_topk index_n_heads linear_num_key_heads mamba_expand type_vocab_size",
    4: "num_attention_heads n_head num_heads n_heads decoder_attention_heads "
    "encoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "linear_num_value_heads time_step_rank mamba_dt_rank mamba_d_conv prompt_length laurel_rank",
    256: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions",
    16: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "kv_lora_rank q_lora_rank mamba_chunk_size chunk_size image_size",
    1: "n_shared_experts n_group topk_group first_k_dense_replace mamba_n_groups "
    "num_random_blocks scale_emb bos_token_id decoder_start_token_id",
    3: "conv_L_cache num_channels",
    64: "max_source_positions expert_capacity",
    4096: "index_topk",
    0: "num_mtp_layers num_nextn_predict_layers num_kv_shared_layers pad_token_id",
}
"""Sizes, and the names that configurations have for them."""

_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout")

_SMALL: dict[str, Any] = {
    **{name: size for size, names in _NAMES.items() for name in names.split()},
    **dict.fromkeys(("tie_word_embeddings", "use_mamba_kernels"), False),
    **dict.fromkeys((*_DROPOUTS, "activation_dropout"), 0.0),
    "attn_pdrop": 0,  # a whole number in MPT's configuration
}

_ALL_HEADS = {"num_key_value_heads": 4}
_WITH_ALL_HEADS = (
    *("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu"),
)
# A few tokens are chosen of 34. An embedding of zeros, as pads have, or few heads would give tokens
# equal scores, and then anything may decide.
_SPARSE = {"index_topk": 6, "index_n_heads": 16, "pad_token_id": None}
_WITH_INDEXERS = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4")
_WITH_FOUR_LAYERS = ("lfm3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_HYBRID = {
    "num_hidden_layers": 3,
    "layers_block_type": ["linear_attention", "linear_attention", "hybrid"],
    "n_mamba_heads": 2,
}

_OF_TYPE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_WITH_ALL_HEADS, _ALL_HEADS),
    **dict.fromkeys(_WITH_INDEXERS, {**_ALL_HEADS, **_SPARSE}),
    **dict.fromkeys(_WITH_FOUR_LAYERS, {"num_hidden_layers": 4}),
    "dots3_note_text": {
        **{**_ALL_HEADS, **_SPARSE},
        "layer_types": ["indexed_attention", "sliding_attention"],
        "per_layer_config": {
            1: {
                **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
                **{"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8},
                **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
            }
        },
    },
    "glm_moe_dsa": {**_ALL_HEADS, **_SPARSE, "indexer_types": ["full", "shared"]},
    "bailing_hybrid": {**_ALL_HEADS, "layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1},
        **{"expert_layer_period": 2, "expert_layer_offset": 1},
    },
    "kimi_linear": {
        **_ALL_HEADS,
        **{"linear_head_dim": 8, "linear_num_heads": 4},
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        **{"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (16, 16), "attention_head_size": 8},
        **{"local_attn_chunk_length": 16, "lsh_attn_chunk_length": 16, "num_buckets": 4},
        "attn_layers": ["local", "lsh"],
    },
    "xlstm": {"hidden_size": 64, "qk_dim_factor": 1.0, "num_blocks": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        **{**_HYBRID, **_ALL_HEADS},
        **{"attention_head_dim": 16, "attention_hidden_size": 64},
    },
    "zamba2": {**_HYBRID, "n_mamba_heads": 8, "mamba_ngroups": 1},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""Fields of types that use other names, or whose sizes must fit each other."""


def build(model_type: str) -> Any:
    """Return a tiny model of a type in eval mode, None if these sizes do not make one."""
    try:
        config = small_config(CONFIG_MAPPING[model_type], model_type)
        check_size(AutoModelForCausalLM.from_config, config)
        model = built(with_sdpa(AutoModelForCausalLM.from_config), config).float()
    except Exception:  # a configuration may object to sizes in any way
        return None
    model.generation_config.forced_bos_token_id = None
    return model


def check_size(make: Callable[..., Any], config: Any) -> None:
    """Raise ValueError if what `make` makes from a configuration is not small."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in make(config).parameters())
    if count > _MOST_PARAMETERS:
        raise ValueError(f"{count} parameters")


def with_sdpa(make: Callable[..., Any]) -> Callable[..., Any]:
    """Let what makes a model from a configuration use sdpa attention if it can, else eager."""

    def made(config: Any, attn_implementation: str = "sdpa") -> Any:
        try:
            return make(config, attn_implementation=attn_implementation)
        except (ValueError, ImportError):
            return make(config, attn_implementation="eager")

    return made


def small_config(
    kind: Any,
    model_type: str | None = None,
    sizes: dict[str, Any] | None = None,
    of_type: dict[str, dict[str, Any]] | None = None,
) -> Any:
    """Return a configuration with small sizes, also in its sub-configurations.

    Besides those above it takes `sizes`, by the names of fields, and fields `of_type`, by type.
    """
    small = {**_SMALL, **(sizes or {})}
    renamed = getattr(kind, "attribute_map", None) or {}
    known = set(inspect.signature(kind.__init__).parameters)
    for base in kind.__mro__:
        known |= set(vars(base).get("__annotations__", {}))
    fields = {name: size for name, size in small.items() if name in known - set(renamed)}
    for name, own in renamed.items():
        if name in small and own in known:
            fields.setdefault(own, small[name])
    parts = getattr(kind, "sub_configs", None)
    whole = kind() if parts else None
    for name in parts or {}:
        if isinstance(part := getattr(whole, name, None), PreTrainedConfig):
            fields[name] = small_config(type(part), part.model_type, sizes, of_type)
    fields.update({**_OF_TYPE, **(of_type or {})}.get(model_type or "", {}))
    for name, value in (("is_encoder_decoder", False), ("is_decoder", True), ("use_cache", True)):
        if name in known:
            fields[name] = value
    return kind(**fields)
