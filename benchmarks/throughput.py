"""Time a queue of mixed prompts that passes through a number of slots.

Systems: plain static batches of as many prompts as there are slots, in the queue's order;
transformers' `generate_batch`; ours, which is `generate_batch` with `speculative=`, without drafts
and with them. Each system runs the same prompts in turn, round after round, and the round of median
speed counts; a system's tokens/s is all its tokens by all its seconds, prefill included. Static
batches of one family are what `end_to_end.py --batch` times.

    python benchmarks/throughput.py --dtype bfloat16 --json throughput.json
    python benchmarks/throughput.py --families code,rag --slots 4 --prompts 16 --rounds 1
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
import time
from typing import Any

import common
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.tools.cli.commands.env import machine
from lookahead_hf.tools.cli.measuring import (
    OURS,
    PLAIN,
    Call,
    Run,
    end_tokens,
    summarize,
    until_end,
)

SYSTEMS: dict[str, Any] = {
    PLAIN: None,
    "transformers": None,
    "ours, no drafts": SpeculativeConfig(budget=0),
    OURS: True,
}
"""What each system passes as `speculative=`."""

PAGE = 256
"""Tokens of a block of transformers' paged cache."""

Prompts = list[list[int]]


class Queue:
    """Prompts that all systems run, by their token ids."""

    def __init__(self, model: Any, tokenizer: Any, prompts: Prompts, shared: dict[str, Any]):
        self._model, self._tokenizer = model, tokenizer
        self._prompts, self._shared = prompts, shared

    def run(self, system: str, slots: int) -> Call:
        """Run a system once."""
        write = self._batches if system == PLAIN else self._queue
        start = time.perf_counter()
        texts = write(system, slots)
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()
        # Forwards of a queue are not counted: a hook would change how its steps run.
        return Call(time.perf_counter() - start, tuple(texts), forwards=1)

    def _batches(self, _: str, slots: int) -> list[tuple[int, ...]]:
        texts, ends = [], end_tokens(self._model)
        for at in range(0, len(self._prompts), slots):
            batch = {"input_ids": self._prompts[at : at + slots]}
            inputs = self._tokenizer.pad(batch, padding_side="left", return_tensors="pt")
            inputs = inputs.to(self._model.device)
            output = self._model.generate(**inputs, **self._shared)
            new = output[:, inputs["input_ids"].shape[1] :].tolist()
            texts += [until_end(row, ends) for row in new]
        return texts

    def _queue(self, system: str, slots: int) -> list[tuple[int, ...]]:
        config = copy.deepcopy(self._model.generation_config)
        config = GenerationConfig.from_dict(config.to_dict() | self._shared)
        extra: dict[str, Any] = {"max_slots": slots, "speculative": SYSTEMS[system]}
        if system == "transformers":
            longest = max(map(len, self._prompts)) + self._shared["max_new_tokens"]
            paged = ContinuousBatchingConfig(
                max_requests_per_batch=slots,
                max_batch_tokens=1024,
                num_blocks=(slots + 1) * (longest // PAGE + 1),  # else most of the memory
                use_async_batching=False,
            )
            extra = {"continuous_batching_config": paged}
        outputs = self._model.generate_batch(self._prompts, generation_config=config, **extra)
        if len(outputs) != len(self._prompts) or any(each.error for each in outputs.values()):
            raise SystemExit("generate_batch did not return every text")
        return [tuple(output.generated_tokens) for output in outputs.values()]


def mixed(options: Any, tokenizer: Any) -> Prompts:
    """The chosen prompts of all families in a random order."""
    options.prompts_per_family = options.prompts
    by_family: dict[str, Prompts] = {}
    for batch in common.chosen_batches(tokenizer, options):
        by_family.setdefault(batch.family, []).append(batch.inputs["input_ids"][0].tolist())
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*by_family.values()))
    prompts = list(itertools.islice(filter(None, in_turn), options.prompts))
    random.Random(0).shuffle(prompts)
    return prompts


def main() -> None:
    parser = common.prompts_parser(__doc__, prompts=96)
    parser.add_argument("--slots", type=common.numbers, default=[4, 8, 32], metavar="SLOTS,SLOTS")
    options = common.parsed(parser, slots=[2], prompts=3)
    model, tokenizer = common.load(options.model, options.dtype, options.device)
    prompts = mixed(options, tokenizer)
    lookahead_hf.enable(model)
    for slots in options.slots:
        longest = max(map(len, prompts))
        lookahead_hf.warm_up(model, batch_size=slots, context_length=longest, seconds=None)
    shared = common.greedy(tokenizer, options)
    queue, few = (Queue(model, tokenizer, part, shared) for part in (prompts, prompts[:4]))
    for name in SYSTEMS:  # warms up
        few.run(name, 4)
    runs = {
        (slots, name): Run(f"{slots} slots", name) for slots in options.slots for name in SYSTEMS
    }
    for number, slots in itertools.product(range(options.rounds), options.slots):
        for at in range(len(SYSTEMS)):
            name = [*SYSTEMS][(number + at) % len(SYSTEMS)]
            print(f"{slots} slots, {name}", file=sys.stderr)
            runs[slots, name].calls.append(queue.run(name, slots))
    report = common.Report(options, **machine(model))
    for line in summarize(list(runs.values())):
        report.add(line)


if __name__ == "__main__":
    main()
