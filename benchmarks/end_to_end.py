"""Time `generate`: plain, HF's prompt lookup, speculative, and speculative with nothing drafted.

Every prompt is run by all systems, one after the other, `--rounds` times; a call's time is the
median of its rounds. A family's tokens/s is all its tokens by all its seconds, prefill included;
ratios are to plain. All systems stop at the same end tokens and the same number of new tokens.
Prompts longer than 1,200 tokens are left out and not counted. Nothing is timed before the model is
warmed up and every system ran once; what drafting learns carries over from prompt to prompt.

    python benchmarks/end_to_end.py --families code_edit,rag --prompts-per-family 3
    python benchmarks/end_to_end.py --dtype bfloat16 --json bf16.json --plot bf16.svg
    python benchmarks/end_to_end.py --batch 4 --sample 0.7,0.95 --threads 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import torch

import lookahead_hf
from lookahead_hf import SpeculativeConfig

PLAIN, LOOKUP, OURS, CACHE_ONLY = "plain", "HF prompt lookup", "speculative", "budget 0"


@dataclass
class Run:
    """What the rounds of one batch by one system gave."""

    family: str
    system: str
    calls: list[common.Call] = field(default_factory=list)
    stats: list[dict[str, Any]] = field(default_factory=list)  # ours only, one per round

    @property
    def seconds(self) -> float:
        return statistics.median(call.seconds for call in self.calls)

    @property
    def texts(self) -> tuple[tuple[int, ...], ...]:
        return self.calls[-1].rows


@dataclass(frozen=True)
class Line:
    """One line of the result: a system on a family, or on all of them."""

    family: str
    system: str
    texts: int
    tokens: int
    tokens_per_second: float
    ratio: float
    tokens_per_step: float
    outside_forward: float | None  # share of the time after the prefill
    identical: float  # share of the texts that are plain's


def systems(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The arguments that each system adds to `generate`."""
    known: dict[str, dict[str, Any]] = {PLAIN: {}}
    if arguments.batch == 1:  # HF's assisted decoding takes no batches
        known[LOOKUP] = {"prompt_lookup_num_tokens": 10}
    known[OURS] = {"speculative": True}
    known[CACHE_ONLY] = {"speculative": SpeculativeConfig(budget=0)}
    return known


def shared_arguments(arguments: argparse.Namespace, pad_token_id: int) -> dict[str, Any]:
    """What all systems pass to `generate`."""
    shared: dict[str, Any] = {
        "max_new_tokens": arguments.new_tokens,
        "pad_token_id": pad_token_id,
        "do_sample": False,
    }
    if arguments.sample:
        temperature, top_p = arguments.sample
        shared |= {"do_sample": True, "temperature": temperature, "top_p": top_p}
    return shared


def measure(
    model: Any, batches: list[common.Batch], arguments: argparse.Namespace, shared: dict[str, Any]
) -> list[Run]:
    """Run every batch by every system, round after round."""
    end_ids = common.end_tokens(model)
    ways = systems(arguments)
    for extra in ways.values():
        common.timed_call(model, batches[0], shared | extra, 0, end_ids)
    runs = {
        (at, name): Run(batch.family, name) for at, batch in enumerate(batches) for name in ways
    }
    for round_number in range(arguments.rounds):
        for at, batch in enumerate(batches):
            for name, extra in _rotated(ways, round_number + at):
                run = runs[at, name]
                run.calls.append(common.timed_call(model, batch, shared | extra, at, end_ids))
                if name in (OURS, CACHE_ONLY):
                    run.stats.append(_checked_stats(model))
            progress = f"\rround {round_number + 1}, call {at + 1} of {len(batches)}"
            print(progress, end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return list(runs.values())


def _rotated(ways: dict[str, dict[str, Any]], by: int) -> Iterable[tuple[str, dict[str, Any]]]:
    """The systems in another order each time: what runs first meets colder caches."""
    items = list(ways.items())
    shift = by % len(items)
    return items[shift:] + items[:shift]


def _checked_stats(model: Any) -> dict[str, Any]:
    stats = lookahead_hf.last_stats(model)
    if stats is None or stats.fallback_reason is not None:
        raise SystemExit(f"the call was not speculated: {stats and stats.fallback_reason}")
    return stats.to_dict()


def summarize(runs: list[Run]) -> list[Line]:
    """A line per family and system, then the same over all families."""
    families = list(dict.fromkeys(run.family for run in runs))
    lines = []
    for family in [*families, "all"]:
        chosen = [run for run in runs if family in (run.family, "all")]
        plain = [run for run in chosen if run.system == PLAIN]
        for system in dict.fromkeys(run.system for run in chosen):
            lines.append(_line(family, [run for run in chosen if run.system == system], plain))
    return lines


def _line(family: str, runs: list[Run], plain: list[Run]) -> Line:
    pairs = [
        pair
        for run, reference in zip(runs, plain, strict=True)
        for pair in zip(run.texts, reference.texts, strict=True)
    ]
    speed = _tokens_per_second(runs)
    return Line(
        family=family,
        system=runs[0].system,
        texts=len(pairs),
        tokens=sum(len(text) for text, _ in pairs),
        tokens_per_second=speed,
        ratio=speed / _tokens_per_second(plain),
        tokens_per_step=_tokens_per_step(runs),
        outside_forward=_outside_forward(runs),
        identical=sum(text == reference for text, reference in pairs) / len(pairs),
    )


def _tokens_per_second(runs: list[Run]) -> float:
    return sum(run.calls[-1].num_tokens for run in runs) / sum(run.seconds for run in runs)


def _tokens_per_step(runs: list[Run]) -> float:
    """(emitted - rows) / row steps; systems without statistics have their forwards counted."""
    if runs[0].stats:
        last = [run.stats[-1] for run in runs]
        emitted = sum(stats["num_emitted"] - stats["rows"] for stats in last)
        return _ratio(emitted, sum(stats["row_steps"] for stats in last))
    if runs[0].system == PLAIN:
        return 1.0
    emitted = sum(run.calls[-1].num_tokens - len(run.texts) for run in runs)
    return _ratio(emitted, sum(run.calls[-1].forwards - 1 for run in runs))


def _outside_forward(runs: list[Run]) -> float | None:
    """Share of the wall time after the prefill that is not inside a forward of the target."""
    if not runs[0].stats:
        return None
    loop = inside = 0.0
    for run in runs:
        for call, stats in zip(run.calls, run.stats, strict=True):
            loop += call.seconds * 1000 - stats["prefill_ms"]
            inside += stats["forward_ms"]
    return 1 - _ratio(inside, loop)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")


def print_lines(lines: list[Line]) -> None:
    """The result as a Markdown table."""
    print("| family | system | tokens/s | ratio | tokens per step | outside forward | identical |")
    print("|---|---|---|---|---|---|---|")
    for line in lines:
        outside = "" if line.outside_forward is None else f"{line.outside_forward:.1%}"
        print(
            f"| {line.family} | {line.system} | {line.tokens_per_second:.1f} | {line.ratio:.2f} "
            f"| {line.tokens_per_step:.2f} | {outside} | {line.identical:.0%} of {line.texts} |"
        )


def plot(lines: list[Line], path: Path) -> None:
    """Speed against plain and tokens per step, by family."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    families = list(dict.fromkeys(line.family for line in lines))
    names = [name for name in dict.fromkeys(line.system for line in lines) if name != PLAIN]
    figure, axes = pyplot.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
    for axis, (attribute, label) in zip(
        axes, [("ratio", "speed (plain = 1)"), ("tokens_per_step", "tokens per step")], strict=True
    ):
        for place, name in enumerate(names):
            values = [getattr(line, attribute) for line in lines if line.system == name]
            at = [index + 0.8 * (place + 0.5) / len(names) - 0.4 for index in range(len(families))]
            axis.bar(at, values, 0.8 / len(names), label=name)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_ylabel(label)
    names_and_bars = axes[0].get_legend_handles_labels()
    figure.legend(*names_and_bars, loc="outside upper center", ncols=len(names))
    axes[1].set_xticks(range(len(families)), families, rotation=20)
    figure.savefig(path)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder or hub name (default: the demo's model)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--families", type=lambda text: text.split(","), metavar="NAME,NAME")
    parser.add_argument("--prompts-per-family", type=int, default=4)
    parser.add_argument("--skip", type=int, default=0, help="leave out the first of each family")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1, help="prompts of a family per call")
    parser.add_argument("--sample", type=_sample, metavar="T,TOP_P", help="default: greedy")
    parser.add_argument("--threads", type=int, help="torch's threads")
    parser.add_argument("--json", type=Path, help="write the lines and every call's seconds there")
    parser.add_argument("--plot", type=Path, help="write a figure there (needs matplotlib)")
    return parser.parse_args(argv)


def _sample(text: str) -> tuple[float, float]:
    temperature, top_p = map(float, text.split(","))
    return temperature, top_p


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model, tokenizer = common.load(arguments.model, arguments.dtype, arguments.device)
    prompts = common.read_prompts(arguments.families)
    chosen = slice(arguments.skip, arguments.skip + arguments.prompts_per_family)
    batches = list(common.batches(tokenizer, prompts, chosen, arguments.batch))
    lookahead_hf.enable(model)
    lengths = {length.bit_length(): length for length in map(common.num_columns, batches)}
    for length in lengths.values():  # costs are told apart by powers of two
        lookahead_hf.warm_up(model, batch_size=arguments.batch, context_length=length)
    runs = measure(model, batches, arguments, shared_arguments(arguments, tokenizer.pad_token_id))
    lines = summarize(runs)
    about = common.machine(model) | {"command": " ".join(sys.argv[1:])}
    print(json.dumps(about))
    print_lines(lines)
    if arguments.json:
        calls = [
            {"family": run.family, "system": run.system, "seconds": [c.seconds for c in run.calls]}
            for run in runs
        ]
        content = {"about": about, "lines": [vars(line) for line in lines], "calls": calls}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    if arguments.plot:
        plot(lines, arguments.plot)


if __name__ == "__main__":
    main()
