"""Time batches and queues of prompts: plain `generate`, transformers' `generate_batch`, and ours.

Two settings:

    static   the prompts of a family as one batch of `generate`, plain and speculative
    queue    mixed prompts of all families that pass through a number of slots:
             plain static batches of as many prompts as there are slots, in the queue's order;
             transformers' `generate_batch`; ours without drafts; ours

Ours in a queue is `generate_batch` with `speculative=`. Each system runs the same prompts in turn,
round after round, and the round of median speed counts; a system's tokens/s is all its tokens by
all its seconds, prefill included. Padding is the share of the tokens fed that are neither of a
prompt, nor a text's last token, nor a draft token. Forwards and tokens fed are counted on a CPU
only: a hook would keep a GPU from replaying graphs.

    python benchmarks/throughput.py --dtype bfloat16 --json throughput.json
    python benchmarks/throughput.py --families code,rag --static 4 --slots 4 --prompts 16 --rounds 1
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import common
import torch
from torch.nn import functional
from transformers import ContinuousBatchingConfig, GenerationConfig

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.tools.cli.commands.env import machine
from lookahead_hf.tools.cli.measuring import until_end

PLAIN, THEIRS, NO_DRAFTS, OURS = "plain static", "transformers", "ours, no drafts", "ours"

PAGE = 256
"""Tokens of a block of transformers' paged cache."""


@dataclass(frozen=True)
class Work:
    """Prompts that all systems run.

    Attributes:
        setting: "static" or "queue".
        family: Family of the prompts, "mixed" in a queue.
        size: Rows of a static batch, or slots of a queue.
        prompts: Token ids of each prompt.
    """

    setting: str
    family: str
    size: int
    prompts: list[list[int]]

    def batches(self) -> list[list[list[int]]]:
        """The prompts as static batches."""
        return [self.prompts[at : at + self.size] for at in range(0, len(self.prompts), self.size)]


@dataclass(frozen=True)
class Measured:
    """One run of a system.

    Attributes:
        seconds: Time of the run.
        texts: New tokens of each prompt.
        forwards: Forwards of the model, 0 where they are not counted.
        fed: Tokens that the model was fed.
        useful: Those of them that are not padding.
    """

    seconds: float
    texts: list[tuple[int, ...]]
    forwards: int
    fed: int
    useful: int

    @property
    def tokens(self) -> int:
        """New tokens of all prompts."""
        return sum(map(len, self.texts))


@dataclass(frozen=True)
class Line:
    """A line of the result: the median round of a system in one setting."""

    setting: str
    family: str
    size: int
    system: str
    tokens: int
    seconds: float
    forwards: int
    fed: int
    useful: int
    ratio: float = 1.0  # of its tokens/s to plain's

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second."""
        return self.tokens / self.seconds

    @property
    def padding(self) -> float:
        """Share of the tokens fed that were padding or of rows that had ended."""
        return max(0.0, 1 - self.useful / self.fed) if self.fed else 0.0


class Systems:
    """The systems, each a function of the work that returns texts and the tokens of use."""

    def __init__(self, model: Any, tokenizer: Any, new_tokens: int) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._ends = common.end_tokens(model)
        self._shared = {
            "max_new_tokens": new_tokens,
            "do_sample": False,
            "pad_token_id": tokenizer.pad_token_id,
        }

    def of(self, setting: str) -> dict[str, Callable[[Work], tuple[list[Any], int]]]:
        """The systems of a setting by name."""
        if setting == "static":
            return {PLAIN: self._plain, OURS: lambda work: self._static(work, True)}
        return {
            PLAIN: self._plain,
            THEIRS: lambda work: self._queue(work),
            NO_DRAFTS: lambda work: self._queue(work, speculative=SpeculativeConfig(budget=0)),
            OURS: lambda work: self._queue(work, speculative=True),
        }

    def _plain(self, work: Work) -> tuple[list[Any], int]:
        return self._static(work, None)

    def _static(self, work: Work, speculative: Any) -> tuple[list[Any], int]:
        texts, useful = [], 0
        for batch in work.batches():
            padded = {"input_ids": batch}
            inputs = self._tokenizer.pad(padded, padding_side="left", return_tensors="pt")
            inputs = {name: inputs[name].to(self._model.device) for name in inputs}
            extra = {} if speculative is None else {"speculative": speculative}
            output = self._model.generate(**inputs, **self._shared, **extra)
            new = output[:, inputs["input_ids"].shape[1] :].tolist()
            texts += [until_end(row, self._ends) for row in new]
            useful += sum(map(len, batch))
            if speculative is None:
                useful += sum(map(len, texts[-len(batch) :])) - len(batch)
            else:
                stats = lookahead_hf.last_stats(self._model)
                assert stats is not None and stats.fallback_reason is None
                useful += stats.row_steps + stats.num_drafted
        return texts, useful

    def _queue(self, work: Work, **extra: Any) -> tuple[list[Any], int]:
        config = copy.deepcopy(self._model.generation_config)
        config = GenerationConfig.from_dict(config.to_dict() | self._shared)
        if extra:
            extra["max_slots"] = work.size
        else:
            longest = max(map(len, work.prompts)) + self._shared["max_new_tokens"]
            extra["continuous_batching_config"] = ContinuousBatchingConfig(
                max_requests_per_batch=work.size,
                max_batch_tokens=1024,
                num_blocks=(work.size + 1) * (longest // PAGE + 1),  # else most of the memory
                use_async_batching=False,
            )
        outputs = self._model.generate_batch(work.prompts, generation_config=config, **extra)
        texts = [tuple(output.generated_tokens) for output in outputs.values()]
        if len(texts) != len(work.prompts) or any(each.error for each in outputs.values()):
            raise SystemExit("generate_batch did not return every text")
        useful = sum(map(len, work.prompts))
        for output, text in zip(outputs.values(), texts, strict=True):
            stats = getattr(output, "speculative_stats", None)
            useful += len(text) - 1 if stats is None else stats.row_steps + stats.num_drafted
        return texts, useful


@contextmanager
def counting(model: Any) -> Iterator[list[int]]:
    """Count forwards and the tokens fed to them, on a CPU."""
    counts, embed = [0, 0], functional.embedding
    weight = model.get_input_embeddings().weight

    def counted(given: torch.Tensor, table: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if table is weight:
            counts[0] += 1
            counts[1] += given.numel()
        return embed(given, table, *args, **kwargs)

    # Beside a hook or another forward of a module, steps would take longer.
    with ExitStack() as stack:
        if model.device.type == "cpu":
            stack.enter_context(mock.patch.object(functional, "embedding", counted))
        yield counts


def run(model: Any, system: Callable[[Work], tuple[list[Any], int]], work: Work) -> Measured:
    """Run a system once."""
    with counting(model) as counts:
        start = time.perf_counter()
        texts, useful = system(work)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return Measured(seconds, texts, *counts, useful)


def measure(model: Any, systems: Systems, works: Sequence[Work], rounds: int) -> list[Line]:
    """Run all systems on all prompts, in another order in each round."""
    found: dict[tuple[int, str], list[Measured]] = {}
    for setting in dict.fromkeys(work.setting for work in works):  # warms up
        first = next(work for work in works if work.setting == setting)
        for system in systems.of(setting).values():
            few = first.prompts[: first.size]
            system(Work(setting, first.family, first.size, few))
    for number, (at, work) in itertools.product(range(rounds), enumerate(works)):
        ways = list(systems.of(work.setting).items())
        shift = (number + at) % len(ways)
        for name, system in ways[shift:] + ways[:shift]:
            print(f"{work.setting} {work.family} {work.size} {name}", file=sys.stderr)
            found.setdefault((at, name), []).append(run(model, system, work))
    return [
        line
        for at, work in enumerate(works)
        for line in lines_of(work, {name: found[at, name] for name in systems.of(work.setting)})
    ]


def lines_of(work: Work, runs: dict[str, list[Measured]]) -> list[Line]:
    """The lines of one work from the runs of each system, plain's first."""
    lines: list[Line] = []
    for name, rounds in runs.items():
        # The lower one of two, so that a round stands for itself.
        middle = statistics.median_low(each.tokens / each.seconds for each in rounds)
        chosen = next(each for each in rounds if each.tokens / each.seconds == middle)
        plain = lines[0].tokens_per_second if lines else middle
        lines.append(
            Line(
                work.setting, work.family, work.size, name, chosen.tokens, chosen.seconds,
                chosen.forwards, chosen.fed, chosen.useful, middle / plain,
            )
        )  # fmt: skip
    return lines


def totals(lines: Sequence[Line]) -> list[Line]:
    """The static batches of a size over all families, by system."""
    groups: dict[tuple[int, str], list[Line]] = {}
    for line in lines:
        if line.setting == "static":
            groups.setdefault((line.size, line.system), []).append(line)
    summed: dict[tuple[int, str], Line] = {}
    for (size, system), group in groups.items():
        sums = [
            sum(getattr(line, name) for line in group)
            for name in ("tokens", "seconds", "forwards", "fed", "useful")
        ]
        line = Line("static", "all", size, system, *sums)
        plain = summed.get((size, PLAIN), line)
        ratio = line.tokens_per_second / plain.tokens_per_second
        summed[size, system] = Line("static", "all", size, system, *sums, ratio)
    return list(summed.values())


def works_of(arguments: argparse.Namespace, tokenizer: Any) -> list[Work]:
    """The static batches of every family and size, and the queue for every number of slots."""
    prompts = common.read_prompts(arguments.families)
    most = max([*arguments.static, arguments.prompts, 1])
    batches = common.batches(tokenizer, prompts, slice(arguments.skip, arguments.skip + most), 1)
    by_family: dict[str, list[list[int]]] = {}
    for batch in batches:
        by_family.setdefault(batch.family, []).append(batch.inputs["input_ids"][0].tolist())
    works = [
        Work("static", family, size, own[:size])
        for size in arguments.static
        for family, own in by_family.items()
        if len(own) >= size
    ]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*by_family.values()))
    mixed = list(itertools.islice(filter(None, in_turn), arguments.prompts))
    random.Random(0).shuffle(mixed)
    return works + [Work("queue", "mixed", slots, mixed) for slots in arguments.slots if mixed]


def print_lines(lines: Sequence[Line]) -> None:
    """The result as a Markdown table."""
    print("| setting | family | size | system | tokens/s | ratio | forwards | fed | padding |")
    print("|---|---|---|---|---|---|---|---|---|")
    for line in lines:
        print(
            f"| {line.setting} | {line.family} | {line.size} | {line.system} "
            f"| {line.tokens_per_second:.1f} | {line.ratio:.2f} | {line.forwards} | {line.fed} "
            f"| {line.padding:.0%} |"
        )


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""

    def sizes(text: str) -> list[int]:
        return [common.positive(part) for part in text.split(",") if part]

    parser = common.model_parser(__doc__)
    parser.add_argument("--families", type=lambda text: text.split(","), metavar="NAME,NAME")
    parser.add_argument("--static", type=sizes, default=[4, 8, 32], metavar="ROWS,ROWS")
    parser.add_argument("--slots", type=sizes, default=[4, 8, 32], metavar="SLOTS,SLOTS")
    parser.add_argument("--prompts", type=int, default=96, help="prompts of the queue")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first of each family")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=common.positive, default=3)
    parser.add_argument("--threads", type=int, help="torch's threads")
    parser.add_argument("--json", type=Path, help="write the lines there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    place = arguments.dtype, arguments.device, arguments.threads
    model, tokenizer = common.load(arguments.model, *place)
    works = works_of(arguments, tokenizer)
    lookahead_hf.enable(model)
    for size in {work.size for work in works}:
        longest = max(len(prompt) for work in works for prompt in work.prompts)
        lookahead_hf.warm_up(model, batch_size=size, context_length=longest, seconds=None)
    about = machine(model) | {"command": " ".join(sys.argv[1:])}
    lines = measure(model, Systems(model, tokenizer, arguments.new_tokens), works, arguments.rounds)
    lines += totals(lines)
    print(json.dumps(about))
    print_lines(lines)
    if arguments.json:
        content = {"about": about, "lines": [asdict(line) for line in lines]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
