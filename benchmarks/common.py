"""What the benchmarks share: prompts and the model."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from lookahead_hf.tools.cli.measuring import Batch, end_tokens

__all__ = [
    "Batch",
    "batches",
    "budget",
    "encode",
    "end_tokens",
    "load",
    "model_parser",
    "num_columns",
    "positive",
    "read_prompts",
    "sampling",
    "with_random_weights",
]

PROMPTS = Path(__file__).parent / "data" / "prompts_dev.jsonl"
MAX_PROMPT_TOKENS = 1200
"""Longer prompts are left out: on a CPU their prefill would be most of what is timed."""


def num_columns(batch: Batch) -> int:
    """Length of the longest prompt of a batch."""
    return int(batch.inputs["input_ids"].shape[1])


def read_prompts(families: list[str] | None, path: Path = PROMPTS) -> dict[str, list[str]]:
    """Prompts by family, in the order of the file of JSON lines; None reads all families.

    Raises:
        ValueError: A family that the file does not have.
    """
    known: dict[str, list[str]] = {}
    with path.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            known.setdefault(row["family"], []).append(row["prompt"])
    unknown = sorted(set(families or ()) - set(known))
    if unknown:
        raise ValueError(f"no family named {', '.join(unknown)}; there are: {', '.join(known)}")
    return {name: known[name] for name in families or known}


def encode(tokenizer: Any, prompts: list[str]) -> dict[str, torch.Tensor]:
    """Chat prompts as one left-padded batch, `input_ids` and `attention_mask` [rows, columns]."""
    texts = prompts
    if tokenizer.chat_template:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
            )
            for prompt in prompts
        ]
    encoded = tokenizer(
        texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
    )
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def batches(
    tokenizer: Any, prompts: dict[str, list[str]], chosen: slice, size: int
) -> Iterator[Batch]:
    """Cut the `chosen` ones of each family's prompts that are short enough into batches."""
    for family, texts in prompts.items():
        fitting = (index for index, text in enumerate(texts) if _fits(tokenizer, text))
        indices = tuple(itertools.islice(fitting, chosen.start, chosen.stop))
        for start in range(0, len(indices), size):
            rows = indices[start : start + size]
            yield Batch(family, rows, encode(tokenizer, [texts[index] for index in rows]))


def _fits(tokenizer: Any, text: str) -> bool:
    return encode(tokenizer, [text])["input_ids"].shape[1] <= MAX_PROMPT_TOKENS


def model_parser(description: str | None) -> argparse.ArgumentParser:
    """A command line that says which model runs, where and in which dtype."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder or hub name (default: the demo's model)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    return parser


def positive(text: str) -> int:
    """A count of at least 1."""
    count = int(text)
    if count < 1:
        raise ValueError
    return count


def budget(text: str) -> str | int:
    """The number of draft tokens, or `auto`."""
    return text if text == "auto" else int(text)


def sampling(text: str) -> tuple[float, float]:
    """Temperature and top-p, as `0.7,0.95`."""
    temperature, top_p = map(float, text.split(","))
    return temperature, top_p


def load(
    folder: str | None, dtype: str, device: str, threads: int | None = None
) -> tuple[Any, Any]:
    """A model and its tokenizer; without a name the demo's, from the cache.

    `threads` is the number of torch's threads from now on; None leaves it to torch.
    """
    from lookahead_hf.tools.cli.models import ensure_demo_model

    if threads:
        torch.set_num_threads(threads)
    name = folder or str(ensure_demo_model())
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
    return model.to(device).eval(), tokenizer


def with_random_weights(model: Any) -> Any:
    """A model of the same architecture, dtype and device that has learned nothing."""
    torch.manual_seed(0)
    fresh = type(model)(model.config).to(model.dtype).to(model.device).eval()
    fresh.generation_config = model.generation_config
    return fresh
