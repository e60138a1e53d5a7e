"""What the benchmarks share: a command line, prompts, a model, and a table that is also a file."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from lookahead_hf.tools.cli.measuring import Batch

PROMPTS = Path(__file__).parent / "data" / "prompts_dev.jsonl"
MAX_PROMPT_TOKENS = 1200
"""Longer prompts are left out: on a CPU their prefill would be most of what is timed."""

DRY: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "families": ["qa"],
    "prompts_per_family": 1,
    "new_tokens": 24,
    "rounds": 1,
    "context": 64,
    "nodes": [3],
    "shapes": ["tiny"],
}
"""The defaults of options with `--dry`."""


def parser(description: str | None, **numbers: int) -> argparse.ArgumentParser:
    """A command line that says which model runs, where and in which dtype.

    Args:
        description: The description of the program.
        numbers: Further options that are one number, with their defaults.
    """
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", help="a folder or hub name (default: the demo's model)")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    made.add_argument("--threads", type=int, help="torch's threads")
    made.add_argument("--json", type=Path, help="also write the lines to this file, as they come")
    made.add_argument("--dry", action="store_true", help="do little, to see that the program runs")
    for name, number in numbers.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=number)
    return made


def prompts_parser(description: str | None, **numbers: int) -> argparse.ArgumentParser:
    """The same, with the prompts that are answered."""
    known = {"prompts_per_family": 4, "skip": 0, "new_tokens": 128, "rounds": 3}
    made = parser(description, **known | numbers)
    made.add_argument("--families", type=words, metavar="NAME,NAME")
    return made


def parsed(made: argparse.ArgumentParser, **dry: Any) -> argparse.Namespace:
    """Read the command line; `dry` are further defaults with `--dry`."""
    options = made.parse_args()
    if options.dry:
        made.set_defaults(**DRY | dry)
        options = made.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    return options


def words(text: str) -> list[str]:
    """Words between commas."""
    return text.split(",")


def numbers(text: str) -> list[int]:
    """Numbers between commas."""
    return [int(part) for part in text.split(",") if part]


def read_prompts(families: list[str] | None, path: Path = PROMPTS) -> dict[str, list[str]]:
    """Prompts by family, in the order of the file of JSON lines; None reads all families."""
    known: dict[str, list[str]] = {}
    with path.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            known.setdefault(row["family"], []).append(row["prompt"])
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


def chosen_batches(tokenizer: Any, options: argparse.Namespace, size: int = 1) -> list[Batch]:
    """The prompts that the command line chooses, in batches."""
    chosen = slice(options.skip, options.skip + options.prompts_per_family)
    return list(batches(tokenizer, read_prompts(options.families), chosen, size))


def greedy(tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """What all systems pass to `generate`."""
    ends = {"max_new_tokens": options.new_tokens, "pad_token_id": tokenizer.pad_token_id}
    return ends | {"do_sample": False}


def load(folder: str | None, dtype: str, device: str) -> tuple[Any, Any]:
    """A model and its tokenizer; without a name the demo's, from the cache."""
    from lookahead_hf.tools.cli.models import ensure_demo_model

    name = folder or str(ensure_demo_model())
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
    return model.to(device).eval(), tokenizer


class Report:
    """Lines of one dataclass, shown and stored as they come.

    A line that cannot be measured says why in its field `ran`, and the next one follows.
    """

    def __init__(self, options: argparse.Namespace, **about: Any) -> None:
        """Store in the file that the options name what the lines are about, and the lines."""
        self.path, self.about = options.json, {"torch": torch.__version__, **about}
        self.about["command"] = " ".join(sys.argv[1:])
        self.lines: list[Any] = []
        self.failed = 0

    def add(self, line: Any, work: Callable[[], Any] = dict) -> None:
        """Add a line with the fields that `work` measures; a list of them adds several lines."""
        try:
            found = work()
        except Exception as error:
            traceback.print_exc()
            self.failed += 1
            said = str(error).strip().partition("\n")[0][:120]
            found = {"ran": f"{type(error).__name__}: {said}"}
        for fields in found if isinstance(found, list) else [found]:
            self._show(asdict(replace(line, **fields)))
            self.lines.append(replace(line, **fields))
        if self.path:
            report = {"about": self.about, "lines": [asdict(each) for each in self.lines]}
            self.path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    def _show(self, values: dict[str, Any]) -> None:
        if not self.lines:
            print(f"| {' | '.join(values)} |\n|{'---|' * len(values)}")
        print(f"| {' | '.join(map(_said, values.values()))} |", flush=True)

    def end(self, may_fail: bool = False) -> None:
        """Exit with status 1 if there is no line, or one failed that may not."""
        if len(self.lines) == self.failed or (self.failed and not may_fail):
            raise SystemExit(f"{self.failed} of {len(self.lines)} lines have failed")


def _said(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)
