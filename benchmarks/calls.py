"""Time whole calls of `generate` that write the same number of tokens, greedy, one row.

Systems: plain `generate` with its growing cache, with a static cache (compiled on a GPU), with
prompt lookup, and ours. Each has two calls before those that count, in which it compiles, captures
and learns; the fastest of `--rounds` counts. Texts of random weights say nothing about how many
drafts are accepted: name a model with `--model`.

    python benchmarks/calls.py --shapes 8B --json calls.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from kernels import wait
from step import load, shapes_parser

import lookahead_hf


@dataclass(frozen=True)
class Line:
    """The fastest call of a system."""

    shape: str
    system: str
    tokens_per_second: float
    execution: str | None = None
    tokens_per_step: float | None = None


def measure(model: Any, shape: str, options: argparse.Namespace) -> Iterator[Line]:
    """Time the calls of every system."""
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, model.config.vocab_size, (1, options.context), device=model.device)
    call = {"max_new_tokens": options.new_tokens, "do_sample": False, "pad_token_id": 0}
    call["attention_mask"] = torch.ones_like(ids)
    systems: dict[str, dict[str, Any]] = {
        "eager": {},
        "static": {"cache_implementation": "static"},
        "prompt lookup": {"prompt_lookup_num_tokens": 10},
        "ours": {"speculative": True},
    }
    with lookahead_hf.enabled(model):
        lookahead_hf.warm_up(model, seconds=None)
        for system, more in systems.items():
            spent = []
            for _ in range(2 + options.rounds):
                start = time.perf_counter()
                out = model.generate(ids, **call, **more)
                wait(model.device)
                spent.append(time.perf_counter() - start)
            new = out.shape[1] - ids.shape[1]
            stats = lookahead_hf.last_stats(model) if system == "ours" else None
            facts = (stats.execution, stats.tokens_per_step) if stats else ()
            yield Line(shape, system, new / min(spent[2:]), *facts)


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table, write the file."""
    parser = shapes_parser(__doc__, ["8B"] if torch.cuda.is_available() else ["0.1B"])
    for name, number in {"context": 512, "new-tokens": 256, "rounds": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--json", type=Path, help="also write the lines to this file, as they come")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    lines: list[Line] = []
    print("| shape | system | tokens per second | steps are | tokens per step |")
    print("|---|---|---|---|---|")
    for shape in [Path(options.model).name] if options.model else options.shapes:
        for line in measure(load(shape, options.model, dtype, device), shape, options):
            lines.append(line)
            per_step = "" if line.tokens_per_step is None else f"{line.tokens_per_step:.2f}"
            print(
                f"| {shape} | {line.system} | {line.tokens_per_second:.1f} "
                f"| {line.execution or ''} | {per_step} |",
                flush=True,
            )
            if options.json:
                report = {"torch": torch.__version__, "lines": [asdict(each) for each in lines]}
                options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
