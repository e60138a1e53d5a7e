"""Time `generate`: plain, HF's prompt lookup, speculative, and speculative with nothing drafted.

Every prompt is run by all systems, one after the other, `--rounds` times; the round of median speed
counts. A family's tokens/s is all its tokens by all its seconds, prefill included;
ratios are to plain. All systems stop at the same end tokens and the same number of new tokens.
Prompts longer than 1,200 tokens are left out and not counted. Nothing is timed before the model is
warmed up and every system ran once; what drafting learns carries over from prompt to prompt.
Ctrl-C prints what there is. Behind all that is timed, plain
decoding runs once more where a speculative text differs from plain's: the exit status is 1 unless
the two tokens are nearly tied there.

    python benchmarks/end_to_end.py --families code_edit,rag --prompts-per-family 3
    python benchmarks/end_to_end.py --dtype bfloat16 --json bf16.json --picture families.svg
    python benchmarks/end_to_end.py --batch 4 --sample 0.7,0.95 --threads 1
    python benchmarks/end_to_end.py --dtype bfloat16 --everywhere --no-cache-only
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import svg
import torch

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.tools.cli.commands.env import machine
from lookahead_hf.tools.cli.measuring import (
    LOOKUP,
    OURS,
    PLAIN,
    Batch,
    Divergence,
    Line,
    Run,
    describe,
    find_divergences,
    measure,
    summarize,
    systems,
)
from lookahead_hf.tools.cli.screen import CommandError

CACHE_ONLY = "budget 0"
EVERYWHERE = "everywhere"
COLOURS = {PLAIN: "#8b949e", LOOKUP: "#d29922", OURS: "#2f81f7"}
"""They stand out on white and on black."""


def with_random_weights(model: Any) -> Any:
    """A model of the same architecture, dtype and device that has learned nothing."""
    torch.manual_seed(0)
    fresh = type(model)(model.config).to(model.dtype).to(model.device).eval()
    fresh.generation_config = model.generation_config
    return fresh


def check_texts(
    model: Any, batches: Sequence[Batch], runs: Sequence[Run], shared: dict[str, Any]
) -> dict[str, list[Divergence | None]]:
    """How the speculative texts of all rounds part from plain's, by system; None: not at all.

    Args:
        model: An enabled model.
        batches: What was measured, the first of them at least.
        runs: What `measure` yielded: all systems of the first batch, then of the second.
        shared: The arguments that all systems passed to `generate`.
    """
    found: dict[str, list[Divergence | None]] = defaultdict(list)
    num_systems = len({run.system for run in runs})
    for seed, batch in enumerate(batches[: len(runs) // max(1, num_systems)]):
        chosen = runs[seed * num_systems : (seed + 1) * num_systems]
        (plain,) = (run.call.rows for run in chosen if run.system == PLAIN)
        ours = [(run.system, call.rows) for run in chosen for call in run.calls if call.stats]
        inputs = {name: tensor.to(model.device) for name, tensor in batch.inputs.items()}
        texts = [rows for _, rows in ours]
        divergences = find_divergences(model, {**inputs, **shared}, plain, texts, seed)
        for (system, _), rows in zip(ours, divergences, strict=True):
            found[system] += rows
    return found


def drawn(lines: Sequence[Line]) -> str:
    """A picture of the lines, a group of bars for each family."""
    groups: dict[str, list[svg.Bar]] = {}
    for line in lines:
        if line.system in COLOURS:
            value = f"{line.tokens_per_second:.0f} tokens/s, {line.ratio:.2f} x plain"
            bar = line.system, line.tokens_per_second, value if line.system == OURS else ""
            groups.setdefault(line.family, []).append(bar)
    return svg.bars(groups, COLOURS, "tokens per second by family")


def main() -> None:
    parser = common.prompts_parser(__doc__, batch=1)
    parser.add_argument("--sample", metavar="T,TOP_P", help="default: greedy")
    parser.add_argument(
        "--random-weights", action="store_true", help="as many random ones: nothing can be guessed"
    )
    parser.add_argument(
        "--no-cache-only", action="store_true", help="leave out the runs that draft nothing"
    )
    parser.add_argument(
        "--everywhere", action="store_true", help='also with compiled_layers="everywhere"'
    )
    parser.add_argument("--picture", type=Path, help="draw the tokens/s as an SVG file")
    options = common.parsed(parser)
    model, tokenizer = common.load(options.model, options.dtype, options.device)
    if options.random_weights:
        model = with_random_weights(model)
    batches = common.chosen_batches(tokenizer, options, options.batch)
    lookahead_hf.enable(model)
    columns = (int(batch.inputs["input_ids"].shape[1]) for batch in batches)
    lengths = {length.bit_length(): length for length in columns}
    for length in lengths.values():  # costs are told apart by powers of two
        lookahead_hf.warm_up(model, batch_size=options.batch, context_length=length, seconds=None)
    shared = common.greedy(tokenizer, options)
    if options.sample:
        temperature, top_p = map(float, options.sample.split(","))
        shared |= {"do_sample": True, "temperature": temperature, "top_p": top_p}
    ways = systems(options.batch)
    if options.everywhere:
        ways[EVERYWHERE] = {"speculative": SpeculativeConfig(compiled_layers="everywhere")}
    if not options.no_cache_only:
        ways[CACHE_ONLY] = {"speculative": SpeculativeConfig(budget=0)}
    runs: list[Run] = []
    try:
        for runs in measure(model, batches, ways, shared, options.rounds):
            print(f"{len(runs[-1].calls)} rounds, {len(runs)} runs", file=sys.stderr)
    except CommandError as error:
        raise SystemExit(str(error)) from error
    except KeyboardInterrupt:
        print("interrupted: the result is that of a part", file=sys.stderr)
    report = common.Report(options, **machine(model))
    for line in summarize(runs):
        report.add(line)
    if options.picture:
        options.picture.write_text(drawn(report.lines))
    parted = check_texts(model, batches, runs, shared)
    for system, rows in parted.items():
        print(f"{system}, all rounds: {describe(rows)}")
    report.end()
    if not all(each is None or each.is_near_tie for rows in parted.values() for each in rows):
        raise SystemExit("A BUG: a speculative text parts from plain's where there is no near tie.")


if __name__ == "__main__":
    main()
