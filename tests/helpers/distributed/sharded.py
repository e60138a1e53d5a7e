"""Calls of a model whose weights two processes share, each with rows of its own; run in both."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import distributed
from torch.distributed.fsdp import fully_shard

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.drafting.rates import memory_of
from lookahead_hf.model import self_test
from tests.helpers.distributed.ranks import (
    BUDGET,
    SAMPLED,
    SETTINGS,
    Found,
    compared,
    one_row,
    two_rows,
)
from tests.helpers.distributed.tensor_parallel import Fails, KnownCosts
from tests.helpers.models import tiny

NEW = (16, 28)  # New tokens in either process


def calls(rank: int, folder: Path) -> Found:
    """All calls, by name."""
    model = lookahead_hf.enable(sharded("llama"))
    own = {"max_new_tokens": NEW[rank]}
    synced: dict[str, Any] = {**SETTINGS, **own, "synced_gpus": True}
    sampled = {**SAMPLED, **own, "synced_gpus": True}
    found = {
        "greedy": compared(model, **one_row(rank), **synced),
        "greedy, two rows": compared(model, **two_rows(), **synced),
        "sampled": compared(model, **one_row(rank), **sampled),
        "sampled, two rows": compared(model, **two_rows(), **sampled),
    }
    vars(memory_of(model))["costs"] = KnownCosts(float(rank))
    found["own costs"] = compared(model, **one_row(), **synced, speculative=True)
    eos = found["greedy, two rows"]["plain"][1][12]
    outputs = {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": eos}
    fails = SpeculativeConfig(drafters=("ngram", *[Fails()] * (rank == 0)), budget=8)
    told_not_to = {**SETTINGS, "synced_gpus": False}
    silent = {"budget": 8, "on_fallback": "silent"}
    untried = lookahead_hf.enable(sharded("qwen3"))
    found |= {
        "outputs": compared(model, **two_rows(), **synced, **outputs),
        "one is plain": compared(
            model, **one_row(rank), **synced, speculative=None if rank else BUDGET
        ),
        "drafter fails": compared(model, **one_row(rank), **synced, speculative=fails),
        "not told": compared(model, **one_row(rank), **told_not_to, speculative=silent),
    }
    with patch.object(self_test, "TRIED", frozenset()):
        found["untried"] = compared(untried, **one_row(rank), **synced)
    found["by itself"] = compared(model, **one_row(rank), **{**SETTINGS, **own})
    return found


def sharded(name: str) -> Any:
    """A tiny model whose weights lie over the processes."""
    model = tiny(name, num_hidden_layers=2)
    mesh = distributed.init_device_mesh("cpu", (2,))
    for module in list(model.modules()):
        if type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
