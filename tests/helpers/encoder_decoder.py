"""Tiny encoder-decoder models and calls of them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.helpers.models import IDS, VOCAB, built, prompt

_T5 = {
    **{"vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
    **{"d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 3, "num_heads": 4},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16},
}
_BART = {
    **IDS,
    **{"d_model": 48, "encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": 64},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 96, "decoder_ffn_dim": 96},
    **{"decoder_start_token_id": 2, "forced_eos_token_id": None, "scale_embedding": False},
}
_GEMMA = {
    **{"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 12},
}
_T5GEMMA = {
    **{"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1},
    **{"encoder": _GEMMA, "decoder": _GEMMA},
}

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0}


def tiny_pair(name: str, attn: str = "eager", scale: float = 3.5, **own: Any) -> Any:
    """A tiny random encoder-decoder model whose texts are varied and do not end by themselves."""
    fields = _T5GEMMA if name == "t5gemma" else _T5 if "t5" in name else _BART
    config = CONFIG_MAPPING[name](**fields, **own)
    return built(AutoModelForSeq2SeqLM.from_config, config, attn, scale)


def texts(rows: int) -> dict[str, torch.Tensor]:
    """Texts for the encoder, of several lengths."""
    ids = prompt(rows, 14, seed=4)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, -4 * row :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def call(rows: int, **settings: Any) -> dict[str, Any]:
    return {**texts(rows), "max_new_tokens": 30, "pad_token_id": 0, **settings}
