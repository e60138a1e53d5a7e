"""Tiny random models, built in memory: the same weights for the same arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 100
NAMES = ("llama", "qwen3", "mistral", "gemma3", "gpt2", "gpt_neox", "phi", "mixtral")

IDS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_COMMON = {
    **IDS,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_GPT2 = {
    **IDS,
    **{"n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": 512},
    "tie_word_embeddings": False,
}
_TWO_KINDS = {
    **_COMMON,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "head_dim": 12,
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
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "head_dim": 12,
            "query_pre_attn_scalar": 12,
        },
    ),
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
}

_SCALE = {"llama": 5.0, "qwen3": 5.0, "gpt2": 4.0, "mixtral": 6.0}


def tiny(
    name: str, attn: str = "sdpa", seed: int = 0, scale: float | None = None, **own: Any
) -> Any:
    """Return a tiny random model in eval mode whose texts are varied and do not end by themselves.

    Args:
        name: One of `NAMES`, "phi3" or "opt"; "gemma2" or "gpt_oss", for eager attention.
        attn: Attention implementation.
        seed: Seed of the weights.
        scale: What the matrices are multiplied with. The default makes texts varied: some loops,
            which drafts can foresee, and much that is new.
        **own: Fields of the configuration that differ.
    """
    model_type, fields = _FIELDS[name]
    config = CONFIG_MAPPING[model_type](**{**fields, **own})
    factor = _SCALE.get(name, 3.0) if scale is None else scale
    return built(AutoModelForCausalLM.from_config, config, attn, factor, seed)


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


def characters(**settings: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer for the tiny models with one character per token id, from "!" on."""
    tokenizer = Tokenizer(BPE({chr(33 + token): token for token in range(VOCAB)}, merges=[]))
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
