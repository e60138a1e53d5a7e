"""Time whole calls of `generate` that write the same number of tokens, greedy and sampled.

Systems: plain `generate` with its growing cache, ours, prompt lookup, several rows as a queue, and
plain with a static cache, which a GPU compiles. `first` is the first call's seconds, in which each
compiles and captures; a second one counts nowhere, and the fastest of `--rounds` more counts as
`tokens_per_second`, of all rows. `equal` is how many tokens of the worst text equal plain's before
the first that does not: in half precision near ties part texts. `gigabytes` is the most memory of
the device that a system's calls had taken, the weights included. Texts of random weights say
nothing about how many drafts are accepted: name a model with `--model`.

    python benchmarks/calls.py --shapes 8B --rows 1,8 --json calls.json
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
from common import Report
from kernel_times import wait
from step import counted, load, said, shapes_parser
from transformers import ContinuousBatchingConfig, GenerationConfig

import lookahead_hf
from lookahead_hf.model.state import state_of


@dataclass(frozen=True)
class Line:
    """The fastest call of a system."""

    shape: str
    rows: int
    system: str
    tokens_per_second: float | None = None
    first: float | None = None
    equal: int | None = None
    tokens_per_step: float | None = None
    gigabytes: float | None = None
    ran: str = ""


def systems(rows: int, on_gpu: bool) -> dict[str, dict[str, Any]]:
    """What each system passes on, the one that may take longest to start last."""
    ours = {"speculative": lookahead_hf.SpeculativeConfig(on_fallback="error")}
    sampled = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
    known: dict[str, dict[str, Any]] = {"plain": {}, "ours": ours}
    if rows == 1:  # HF's assisted decoding takes no batches
        known["prompt lookup"] = {"prompt_lookup_num_tokens": 10}
    known |= {"plain sampled": sampled, "ours sampled": sampled | ours}
    if rows == 1:
        return known | {"static": {"cache_implementation": "static"}}
    known["ours queue"] = ours | {"max_slots": rows}
    if on_gpu:
        blocks = ContinuousBatchingConfig(num_blocks=64 * rows, use_async_batching=False)
        known["plain queue"] = {"continuous_batching_config": blocks}
    return known


class Bench:
    """One model and prompts of one length."""

    def __init__(self, model: Any, rows: int, options: argparse.Namespace) -> None:
        self.model, self.options = model, options
        shape = rows, options.context
        self.ids = torch.randint(3, model.config.vocab_size, shape, device=model.device)
        self.plain: dict[bool, list[list[int]]] = {}

    def texts(self, system: str, more: dict[str, Any]) -> list[list[int]]:
        """The new tokens of a call."""
        torch.manual_seed(0)
        call = {"max_new_tokens": self.options.new_tokens, "do_sample": False, "pad_token_id": 0}
        if system.endswith("queue"):
            config = GenerationConfig(**call)
            found = self.model.generate_batch(self.ids.tolist(), config, **more)
            texts = [each.generated_tokens for each in found.values()]
        else:
            call["attention_mask"] = torch.ones_like(self.ids)
            texts = self.model.generate(self.ids, **(call | more))[:, self.ids.shape[1] :].tolist()
        wait(self.model.device)
        if {*map(len, texts)} != {self.options.new_tokens}:
            raise RuntimeError(f"it wrote texts of {[*map(len, texts)]} tokens")
        return texts

    def measure(self, system: str, more: dict[str, Any]) -> dict[str, Any]:
        """Time the calls of a system, and compare its texts with plain's."""
        on_gpu, spent = self.model.device.type == "cuda", []
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        with counted() as asked:
            for _ in range(2 + self.options.rounds):
                start = time.perf_counter()
                texts = self.texts(system, more)
                spent.append(time.perf_counter() - start)
        plain = self.plain.setdefault("do_sample" in more, texts)
        found: dict[str, Any] = {
            "first": spent[0],
            "tokens_per_second": len(texts) * self.options.new_tokens / min(spent[2:]),
            "equal": min(map(num_equal, texts, plain)),
            "gigabytes": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None,
        }
        if "speculative" not in more:
            is_compiled = torch._dynamo.utils.counters["frames"]["ok"] > 0
            return found | {"ran": "compiled" if is_compiled else "eager"}
        stats = lookahead_hf.last_stats(self.model)
        assert stats is not None
        state_of(self.model).free()  # the next one's memory is its own
        ran = said(stats.execution, asked, self.model.device)
        return found | {"tokens_per_step": stats.tokens_per_step, "ran": ran}


def num_equal(text: list[int], other: list[int]) -> int:
    """The tokens before the first in which two texts differ."""
    same = (one == two for one, two in zip(text, other, strict=True))
    return len([*itertools.takewhile(bool, same)])


def main() -> None:
    """Measure, print a table, write the file."""
    shapes = ["8B"] if torch.cuda.is_available() else ["0.1B"]
    parser = shapes_parser(__doc__, shapes, context=512, new_tokens=256, rounds=2)
    parser.add_argument("--rows", type=common.numbers, default=[1])
    options = common.parsed(parser, rows=[1, 2], new_tokens=16)
    torch.manual_seed(0)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    report = Report(options, device=options.device, dtype=options.dtype)
    for shape in [Path(options.model).name] if options.model else options.shapes:
        model = load(shape, options.model, dtype, device)
        model.generation_config.eos_token_id = None
        with lookahead_hf.enabled(model):
            for rows in reversed(options.rows):
                bench = Bench(model, rows, options)
                for system, more in systems(rows, device.type == "cuda").items():
                    report.add(Line(shape, rows, system), partial(bench.measure, system, more))
    report.end()


if __name__ == "__main__":
    main()
