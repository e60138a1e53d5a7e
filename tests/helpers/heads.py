"""Tiny models with multi-token-prediction layers or Medusa heads that are right sometimes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import one_hot
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.helpers.models import VOCAB, tiny


def with_layers(model_type: str, num_layers: int = 1) -> tuple[Any, Any]:
    """Return a tiny random model and random multi-token-prediction layers for it.

    Types are "glm4_moe", "deepseek_v3" and "mellum", whose only layer sees a window of 8 tokens.
    """
    model = tiny(model_type, num_mtp_layers=num_layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = MtpModel(model, num_layers).eval()
        for parameter in layers.layers.parameters():  # it leaves some as they are in memory
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)
        for buffer in layers.layers.buffers():
            buffer.zero_()
    return model, layers


def states_of(model: Any, text: list[int]) -> torch.Tensor:
    """Return the model's last hidden states, [1, tokens, hidden]."""
    with torch.no_grad():
        output = model(input_ids=torch.tensor([text]), output_hidden_states=True)
    return output.hidden_states[-1]


def written(layers: Any, states: torch.Tensor, text: list[int], num_draft: int) -> list[int]:
    """Return the likeliest chain after a text, from transformers' own masks and an empty cache.

    `states` are those of all tokens but the last, [1, tokens - 1, hidden].
    """
    cache, ids = MtpCache(), torch.tensor([text[1:]])
    positions = torch.arange(1, len(text))[None]
    for depth in range(num_draft):
        layer = min(depth, len(layers.layers) - 1)
        if depth > layer:
            states, ids, positions = states[:, -1:], ids[:, -1:], positions[:, -1:]
        with torch.no_grad():
            states = layers.forward_layer(layer, states, positions, cache, input_ids=ids)
            token = layers._project_to_logits(states[:, -1:]).argmax(-1)
        ids = torch.cat([ids[:, 1:], token], 1)
        positions = torch.cat([positions[:, 1:], positions[:, -1:] + 1], 1)
        text = [*text, int(token)]
    return text[-num_draft:]


@torch.no_grad()
def fit(model: Any, layers: Any, texts: list[list[int]]) -> None:
    """Make the layers right sometimes: fit what each reads to what follows, by least squares.

    A random layer of attention and experts changes little of it.
    """
    wanted = model.lm_head.weight / model.lm_head.weight.norm(dim=1, keepdim=True)
    states = [states_of(model, text)[:, :-1] for text in texts]
    for index, layer in enumerate(layers.layers):
        seen = [torch.tensor([text[index + 1 :]]) for text in texts]
        states = [each[:, : ids.shape[1]] for each, ids in zip(states, seen, strict=True)]
        embedded = [layer.enorm(model.get_input_embeddings()(ids)) for ids in seen]
        read = [
            torch.cat([token, layer.hnorm(state)], -1)[0, :-1]
            for token, state in zip(embedded, states, strict=True)
        ]
        after = torch.cat([ids[0, 1:] for ids in seen])
        fitted = torch.linalg.lstsq(torch.cat(read), wanted[after]).solution
        layer.eh_proj.weight.copy_(fitted.T)
        states = [
            layers.forward_layer(
                index, state, torch.arange(index + 1, len(text))[None], MtpCache(), input_ids=ids
            )
            for state, ids, text in zip(states, seen, texts, strict=True)
        ]


def medusa_heads(model: Any, texts: list[list[int]], num_heads: int) -> dict[str, torch.Tensor]:
    """Return Medusa-1 heads, fitted to texts by least squares, by their published names."""
    hidden = int(model.config.hidden_size)
    tensors: dict[str, torch.Tensor] = {}
    for head in range(num_heads):
        given = torch.cat([states_of(model, text)[0, : -head - 2] for text in texts])
        after = torch.cat([one_hot(torch.tensor(text[head + 2 :]), VOCAB) for text in texts])
        tensors[f"{head}.0.linear.weight"] = torch.zeros(hidden, hidden)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(hidden)
        fitted = torch.linalg.lstsq(given, 8.0 * after.float()).solution
        tensors[f"{head}.1.weight"] = fitted.T.contiguous()
    return tensors


def save_with_layers(model: Any, layers: Any, folder: Path) -> None:
    """Save a model, and its multi-token-prediction layers as published checkpoints name them."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in layers.layers.state_dict().items():
        index, _, rest = name.partition(".")
        tensors[_name(model.config, int(index), rest)] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _name(config: Any, index: int, rest: str) -> str:
    if config.model_type == "mellum":
        fields = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
        field, _, leaf = rest.partition(".")
        if field == "mtp_block":
            return f"mtp.layers.{index}.{leaf}"
        return f"mtp.{fields.get(field, 'norm')}.{leaf}"
    rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
    return f"model.layers.{config.num_hidden_layers + index}.{rest}"
