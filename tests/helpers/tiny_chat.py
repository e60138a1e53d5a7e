"""A tiny random model with a byte tokenizer and a chat template, saved in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.helpers.models import tiny

DRAFTING: dict[str, Any] = {"budget": 8}
"""On a tiny model no draft is worth its cost, and what is drafted would hang on the clock."""

PAD, END = "<pad>", "<end>"
TEMPLATE = "{% for message in messages %}{{ message.content }}" + END + "{% endfor %}"


def save_tiny_chat(folder: Path) -> Path:
    """Write the model and its tokenizer into `folder` and return it."""
    byte_tokenizer().save_pretrained(folder)
    own = {"vocab_size": len(byte_tokenizer()), "bos_token_id": None, "eos_token_id": 1}
    own |= {"num_hidden_layers": 2, "max_position_embeddings": 2048}
    model = tiny("llama", scale=4.0, **own)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    return folder


def save_looping_chat(folder: Path) -> Path:
    """The same for a model that writes eight tokens over and over, whatever the prompt is.

    The next token hangs on the last one alone: no layer adds anything to its embedding.
    """
    model = AutoModelForCausalLM.from_pretrained(save_tiny_chat(folder))
    embedding = model.get_input_embeddings().weight
    last = torch.arange(len(embedding))
    following = torch.where(last < 8, last + 8, last - last % 8 + (last + 1) % 8)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        known = following < len(embedding)
        model.lm_head.weight[following[known]] = embedding[known]
    model.save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([PAD, END, *symbols])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=TEMPLATE
    )
