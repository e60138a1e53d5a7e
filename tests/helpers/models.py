"""Tiny random models, built in memory: the same weights for the same arguments.

This is the table of those that tests know by name. Types that need no name have helpers that find
sizes themselves: architectures.py and multimodal.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    PreTrainedTokenizerFast,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 100
NAMES = ("llama", "qwen3", "mistral", "gemma3", "gpt2", "gpt_neox", "phi", "mixtral")

IDS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_COMMON = {
    **IDS,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_GPT2 = {
    **IDS,
    **{"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "tie_word_embeddings": False,
}
_TWO_KINDS = {
    **_COMMON,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "head_dim": 12,
}
_SHARED = {
    **{**_COMMON, "hidden_size": 32, "head_dim": 12, "sliding_window": 8},
    **{"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
    **{"num_kv_shared_layers": 2, "activation_sparsity_pattern": None},
    **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
}
_FEW_EXPERTS = {
    **{**_COMMON, "hidden_size": 32, "intermediate_size": 48},
    **{"moe_intermediate_size": 16, "num_experts_per_tok": 2},
}
_T5 = {
    **{"vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
    **{"d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 3, "num_heads": 4},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16},
}
_TWO_HALVES = {
    **{"d_model": 48, "encoder_layers": 2, "decoder_layers": 3},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 96, "decoder_ffn_dim": 96},
}
_BART = {
    **{**IDS, **_TWO_HALVES, "max_position_embeddings": 64, "scale_embedding": False},
    **{"decoder_start_token_id": 2, "forced_eos_token_id": None},
}
_GEMMA = {
    **{"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 12},
}
_T5GEMMA = {
    **{"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1},
    **{"encoder": _GEMMA, "decoder": _GEMMA},
}
_WHISPER = {
    **{**_TWO_HALVES, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64},
    **{"suppress_tokens": None, "begin_suppress_tokens": None, "tie_word_embeddings": False},
}
_MOONSHINE = {
    **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 2},
    **{"hidden_size": 48, "intermediate_size": 96, "tie_word_embeddings": False},
    **{"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 3},
    **{"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4},
}
_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _COMMON),
    "qwen3": ("qwen3", {**_COMMON, "head_dim": 12}),
    "mistral": ("mistral", {**_COMMON, "sliding_window": 8}),
    "gemma3": (
        "gemma3_text",
        {
            **_COMMON,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "head_dim": 12,
            "query_pre_attn_scalar": 12,
        },
    ),
    "gemma3n": ("gemma3n_text", {**_SHARED, "altup_num_inputs": 2, "laurel_rank": 4}),
    "gemma4": ("gemma4_text", {**_SHARED, "global_head_dim": 12}),
    "gpt2": ("gpt2", _GPT2),
    "gpt_neox": ("gpt_neox", _COMMON),
    "phi": ("phi", {**_COMMON, "num_key_value_heads": 4}),
    "mixtral": (
        "mixtral",
        {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "phi3": ("phi3", {**_COMMON, "sliding_window": None}),
    "opt": ("opt", {**_COMMON, "ffn_dim": 96, "word_embed_proj_dim": 48}),
    "gemma2": ("gemma2", {**_TWO_KINDS, "attn_logit_softcapping": 2.0}),
    "gpt_oss": ("gpt_oss", {**_TWO_KINDS, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "glm4_moe": ("glm4_moe", {**_FEW_EXPERTS, "n_routed_experts": 4, "head_dim": 8}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **{**_FEW_EXPERTS, "n_routed_experts": 4, "num_key_value_heads": 4},
            **{"n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16},
            **{"v_head_dim": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
        },
    ),
    "mellum": (
        "mellum",
        {
            **{**_FEW_EXPERTS, "num_experts": 4, "head_dim": 8, "sliding_window": 8},
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "t5gemma": ("t5gemma", _T5GEMMA),
    "whisper": ("whisper", _WHISPER),
    "moonshine": ("moonshine", _MOONSHINE),
}

_SCALE = {"llama": 5.0, "qwen3": 5.0, "gpt2": 4.0, "mixtral": 6.0, "whisper": 4.0, "moonshine": 4.0}


def tiny(
    name: str, attn: str | None = None, seed: int = 0, scale: float | None = None, **own: Any
) -> Any:
    """Return a tiny random model in eval mode whose texts are varied and do not end by themselves.

    Args:
        name: One of `_FIELDS`, or the type of another encoder-decoder model of text.
        attn: Attention implementation; by default "sdpa", of pairs for text "eager".
        seed: Seed of the weights.
        scale: What the matrices are multiplied with. The default makes texts varied: some loops,
            which drafts can foresee, and much that is new.
        **own: Fields of the configuration that differ.
    """
    model_type, fields = _FIELDS.get(name, (name, _T5 if "t5" in name else _BART))
    config = CONFIG_MAPPING[model_type](**{**fields, **own})
    kinds = AutoModelForSpeechSeq2Seq, AutoModelForSeq2SeqLM, AutoModelForCausalLM
    kind = next(each for each in kinds if type(config) in each._model_mapping)
    is_pair = kind is AutoModelForSeq2SeqLM
    factor = scale or _SCALE.get(name, 3.5 if is_pair else 3.0)
    return built(kind.from_config, config, attn or ("eager" if is_pair else "sdpa"), factor, seed)


def built(
    make: Callable[..., Any], config: Any, attn: str = "sdpa", scale: float = 3.0, seed: int = 0
) -> Any:
    """Do the same for a configuration, from which `make` makes a model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make(config, attn_implementation=attn).eval()
    settings = model.generation_config
    settings.eos_token_id = settings.forced_eos_token_id = None
    return enlarged(model, scale)


def pair(decoder: str, reads: str = "vit", attn: str | None = None, **own: Any) -> Any:
    """Return a pair of two models: one that reads pictures, or texts, and a decoder.

    Args:
        decoder: The type of the decoder.
        reads: The type of the encoder, "vit" or "bert".
        attn: Attention implementation of both; by default "sdpa", "eager" where TrOCR has no other.
        **own: Fields of the decoder's configuration that differ.
    """
    sizes = {**_COMMON, **_GPT2, **_BART, "image_size": 16, "patch_size": 8}
    sizes |= {"is_encoder_decoder": False, "cross_attention_hidden_size": 48}
    sizes |= {"num_hidden_layers": 3}
    crosses = {"is_decoder": True, "add_cross_attention": True}
    parts = CONFIG_MAPPING[reads](**sizes), CONFIG_MAPPING[decoder](**{**sizes, **crosses, **own})
    of_pictures = VisionEncoderDecoderConfig, VisionEncoderDecoderModel
    of_texts = EncoderDecoderConfig, EncoderDecoderModel
    config, kind = of_pictures if reads == "vit" else of_texts
    attn = attn or ("eager" if decoder == "trocr" else "sdpa")
    model = built(kind._from_config, config.from_encoder_decoder_configs(*parts), attn)
    model.generation_config.decoder_start_token_id = 1
    return model


def enlarged(model: Any, factor: float) -> Any:
    """Multiply a random model's matrices, which makes its texts varied; return the model."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return model


def unsure(model: Any, noise: float = 0.1) -> Any:
    """Return a copy of a model that mostly, but not always, writes the same."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            spread = noise * parameter.std() if parameter.numel() > 1 else 0.0
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    return other


def characters(order: Sequence[int] = range(VOCAB), **settings: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer for the tiny models: characters from "!" on have these token ids."""
    tokenizer = Tokenizer(BPE({chr(33 + at): token for at, token in enumerate(order)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def prompt(rows: int = 1, length: int = 12, seed: int = 0) -> torch.Tensor:
    """Return random token ids without special ones, [rows, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, length), generator=generator)


def left_padded(pads: Sequence[int], length: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a batch of prompts whose rows have so many pads on the left."""
    mask = (torch.arange(length) >= torch.tensor(pads)[:, None]).long()
    return {"input_ids": prompt(len(pads), length, seed), "attention_mask": mask}
