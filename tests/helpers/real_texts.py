"""Prompts for the real model and the texts that it writes."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

PROMPTS = Path(__file__).parents[1] / "benchmarks" / "data" / "prompts_dev.jsonl"


def texts(per_family: int, longest: int = 1500) -> list[str]:
    """Prompts of every family, short enough for a test."""
    families: dict[str, list[str]] = defaultdict(list)
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if len(row["prompt"]) <= longest and len(families[row["family"]]) < per_family:
            families[row["family"]].append(row["prompt"])
    return [text for family in families.values() for text in family]


def encode(tokenizer: Any, prompts: list[str]) -> dict[str, torch.Tensor]:
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    rendered = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    return tokenizer(rendered, return_tensors="pt", padding=True, add_special_tokens=False)
