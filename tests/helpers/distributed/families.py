"""Calls of other architectures, spread by transformers and by DeepSpeed; run in both processes."""

from __future__ import annotations

from pathlib import Path

from transformers.integrations import HfDeepSpeedConfig

import lookahead_hf
from tests.helpers.distributed import ranks
from tests.helpers.distributed.ranks import SAMPLED, SETTINGS, Found, compared, one_row, two_rows
from tests.helpers.models import tiny

NAMES = ("qwen3", "gemma3", "mixtral", "mistral", "phi3")

NEW = (12, 28)  # New tokens in either process where each has rows of its own


def save(folder: Path) -> None:
    """Save a tiny model of every architecture."""
    for name in NAMES:
        own = {"layer_types": ["sliding_attention", "full_attention"]} if name == "gemma3" else {}
        tiny(name, num_hidden_layers=2, **own).save_pretrained(folder / name)


def calls(rank: int, folder: Path) -> Found:
    """A call of every architecture, by its name and by what the processes share."""
    found: Found = {}
    for name in NAMES:
        for shared in ("tp_size", "fsdp_size"):
            model = ranks.spread(folder / name, **{shared: 2})
            own = {"max_new_tokens": NEW[rank]} if shared == "fsdp_size" else {}
            found[f"{name}, {shared}"] = compared(model, **two_rows(), **{**SETTINGS, **own})
    return found


def of_deepspeed(rank: int, folder: Path) -> Found:
    """Calls of a model whose weights ZeRO-3 shares out."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1}
    kept = HfDeepSpeedConfig(config)  # transformers asks whether there is one
    model = deepspeed.initialize(model=tiny("llama", num_hidden_layers=2), config=config)[0].module
    lookahead_hf.enable(model.eval())
    own = {"max_new_tokens": NEW[rank]}
    found = {
        "greedy": compared(model, **one_row(rank), **{**SETTINGS, **own}),
        "sampled": compared(model, **two_rows(), **{**SAMPLED, **own}),
    }
    del kept
    return found
