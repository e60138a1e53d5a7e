"""The real model, prompts for it, and its calls."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lookahead_hf
from lookahead_hf.tools.cli.models import ensure_demo_model

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "data" / "prompts_dev.jsonl"


def load_real_model(dtype: torch.dtype) -> tuple[Any, Any]:
    """The demo's model, enabled, and its tokenizer, which pads on the left."""
    folder = ensure_demo_model()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return lookahead_hf.enable(model), tokenizer


def texts(per_family: int, longest: int = 1500, skip: int = 0) -> list[str]:
    """Prompts of every family, of at most `longest` characters.

    Some of each family can be skipped: the first 8 were used to tune drafting.
    """
    families: dict[str, list[str]] = defaultdict(list)
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        families[row["family"]].append(row["prompt"])
    short = ([text for text in all_[skip:] if len(text) <= longest] for all_ in families.values())
    return [text for chosen in short for text in chosen[:per_family]]


def encode(tokenizer: Any, prompts: list[str]) -> dict[str, torch.Tensor]:
    """Prompts as chats, `input_ids` and `attention_mask` [rows, columns], padded on the left."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    rendered = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    encoded = tokenizer(rendered, return_tensors="pt", padding=True, add_special_tokens=False)
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}
