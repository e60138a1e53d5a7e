"""What the benchmarks share: prompts, the model, and one timed call."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

PROMPTS = Path(__file__).parent / "data" / "prompts_dev.jsonl"
MAX_PROMPT_TOKENS = 1200
"""Longer prompts are left out: on a CPU their prefill would be most of what is timed."""


@dataclass(frozen=True)
class Batch:
    """Prompts that are generated in one call."""

    family: str
    indices: tuple[int, ...]  # of the prompts within their family
    inputs: dict[str, torch.Tensor]  # input_ids and attention_mask, [rows, columns]


def num_columns(batch: Batch) -> int:
    """Length of the longest prompt of a batch."""
    return int(batch.inputs["input_ids"].shape[1])


@dataclass(frozen=True)
class Call:
    """One timed call of `generate`."""

    seconds: float
    rows: tuple[tuple[int, ...], ...]  # new tokens of each row, up to and with its end token
    forwards: int  # forwards of the model, the prefill's included

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.rows))


def read_prompts(families: list[str] | None) -> dict[str, list[str]]:
    """Prompts by family, in the file's order; None reads all families.

    Raises:
        ValueError: A family that the file does not have.
    """
    known: dict[str, list[str]] = {}
    with PROMPTS.open(encoding="utf-8") as lines:
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


def load(folder: str | None, dtype: str, device: str) -> tuple[Any, Any]:
    """A model and its tokenizer; without a name the demo's, from the cache."""
    from lookahead_hf.cli.real_model import ensure_demo_model
    from lookahead_hf.cli.screen import PlainScreen

    name = folder or str(ensure_demo_model(PlainScreen()))
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
    return model.to(device).eval(), tokenizer


def timed_call(
    model: Any, batch: Batch, arguments: dict[str, Any], seed: int, end_ids: frozenset[int]
) -> Call:
    """Run `generate` once, seeded, and count the model's forwards."""
    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    inputs = {name: tensor.to(model.device) for name, tensor in batch.inputs.items()}
    handle = model.register_forward_pre_hook(count)
    torch.manual_seed(seed)
    try:
        wait = _synchronizer(model.device)
        start = time.perf_counter()
        output = model.generate(**inputs, **arguments)
        wait()
        seconds = time.perf_counter() - start
    finally:
        handle.remove()
    new = output[:, inputs["input_ids"].shape[1] :].tolist()
    return Call(seconds, tuple(_until_end(row, end_ids) for row in new), forwards)


def _synchronizer(device: torch.device) -> Callable[[], None]:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def _until_end(row: list[int], end_ids: frozenset[int]) -> tuple[int, ...]:
    ends = [index for index, token in enumerate(row) if token in end_ids]
    return tuple(row[: ends[0] + 1] if ends else row)


def end_tokens(model: Any) -> frozenset[int]:
    """The token ids at which a text of this model ends."""
    ids = model.generation_config.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())


def machine(model: Any) -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    from lookahead_hf.cli import env

    gpu = torch.cuda.get_device_name() if model.device.type == "cuda" else None
    return {
        "device": gpu or env.cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": Path(model.config.name_or_path).name,
        "parameters": model.num_parameters(),
        **{name: env.versions()[name] for name in ("torch", "transformers", "lookahead-hf")},
    }
