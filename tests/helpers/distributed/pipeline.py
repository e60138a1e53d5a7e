"""Calls of a model whose layers lie over two processes; run in both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import lookahead_hf
from tests.helpers.distributed.ranks import SAMPLED, SETTINGS, Found, compared, one_row, two_rows

SILENT = {"on_fallback": "silent"}


def calls(rank: int, folder: Path) -> Found:
    """All calls, by name."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder / "model", distributed_config=DistributedConfig(pp_size=2)
    ).eval()
    model.generation_config.eos_token_id = None
    lookahead_hf.enable(model)
    return {
        "greedy": compared(model, **one_row(), **SETTINGS, speculative=SILENT),
        "sampled, two rows": compared(model, **two_rows(), **SAMPLED, speculative=SILENT),
    }
