"""Time `generate`: plain, HF's prompt lookup, speculative, and speculative with nothing drafted.

Every prompt is run by all systems, one after the other, `--rounds` times; the round of median speed
counts. A family's tokens/s is all its tokens by all its seconds, prefill included;
ratios are to plain. All systems stop at the same end tokens and the same number of new tokens.
Prompts longer than 1,200 tokens are left out and not counted. Nothing is timed before the model is
warmed up and every system ran once; what drafting learns carries over from prompt to prompt.
The JSON file is kept up to date, and Ctrl-C prints what there is. Behind all that is timed, plain
decoding runs once more where a speculative text differs from plain's: the exit status is 1 unless
the two tokens are nearly tied there.

    python benchmarks/end_to_end.py --families code_edit,rag --prompts-per-family 3
    python benchmarks/end_to_end.py --dtype bfloat16 --json bf16.json
    python benchmarks/end_to_end.py --batch 4 --sample 0.7,0.95 --threads 1
    python benchmarks/end_to_end.py --dtype bfloat16 --everywhere --no-cache-only
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import common
from results import are_near_ties, check_texts, print_lines, store

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.tools.cli.commands.env import machine
from lookahead_hf.tools.cli.measuring import Run, measure, summarize, systems
from lookahead_hf.tools.cli.screen import CommandError

CACHE_ONLY = "budget 0"
EVERYWHERE = "everywhere"


def shared_arguments(arguments: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """What all systems pass to `generate`."""
    shared: dict[str, Any] = {
        "max_new_tokens": arguments.new_tokens,
        "pad_token_id": tokenizer.pad_token_id,
        "do_sample": False,
    }
    if arguments.sample:
        temperature, top_p = arguments.sample
        shared |= {"do_sample": True, "temperature": temperature, "top_p": top_p}
    return shared


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = common.model_parser(__doc__)
    parser.add_argument("--families", type=lambda text: text.split(","), metavar="NAME,NAME")
    parser.add_argument("--prompts-per-family", type=int, default=4)
    parser.add_argument("--skip", type=int, default=0, help="leave out the first of each family")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1, help="prompts of a family per call")
    parser.add_argument("--sample", type=common.sampling, metavar="T,TOP_P", help="default: greedy")
    parser.add_argument(
        "--random-weights", action="store_true", help="as many random ones: nothing can be guessed"
    )
    parser.add_argument(
        "--no-cache-only", action="store_true", help="leave out the runs that draft nothing"
    )
    parser.add_argument(
        "--everywhere", action="store_true", help='also with compiled_layers="everywhere"'
    )
    parser.add_argument("--threads", type=int, help="torch's threads")
    parser.add_argument("--json", type=Path, help="write the lines and every call's seconds there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    place = arguments.dtype, arguments.device, arguments.threads
    model, tokenizer = common.load(arguments.model, *place)
    if arguments.random_weights:
        model = common.with_random_weights(model)
    prompts = common.read_prompts(arguments.families)
    chosen = slice(arguments.skip, arguments.skip + arguments.prompts_per_family)
    batches = list(common.batches(tokenizer, prompts, chosen, arguments.batch))
    lookahead_hf.enable(model)
    lengths = {length.bit_length(): length for length in map(common.num_columns, batches)}
    for length in lengths.values():  # costs are told apart by powers of two
        lookahead_hf.warm_up(model, batch_size=arguments.batch, context_length=length, seconds=None)
    about = machine(model) | {"command": " ".join(sys.argv[1:])}
    runs: list[Run] = []
    shared = shared_arguments(arguments, tokenizer)
    try:
        ways = systems(arguments.batch)
        if arguments.everywhere:
            ways[EVERYWHERE] = {"speculative": SpeculativeConfig(compiled_layers="everywhere")}
        if not arguments.no_cache_only:
            ways[CACHE_ONLY] = {"speculative": SpeculativeConfig(budget=0)}
        measured = measure(model, batches, ways, shared, arguments.rounds)
        for done, runs in enumerate(measured, 1):
            print(f"{done} of {arguments.rounds * len(batches)}", file=sys.stderr)
            if arguments.json:
                store(arguments.json, about, runs)
    except CommandError as error:
        raise SystemExit(str(error)) from error
    except KeyboardInterrupt:
        print("interrupted: the result is that of a part", file=sys.stderr)
    print(json.dumps(about))
    lines = summarize(runs)
    divergences = check_texts(model, batches, runs, shared)
    print_lines(lines, divergences)
    if empty := [f"{line.system}, {line.family}" for line in lines if not line.tokens]:
        raise SystemExit(f"nothing was written by: {'; '.join(empty)}")
    if not are_near_ties(divergences):
        raise SystemExit("A BUG: a speculative text parts from plain's where there is no near tie.")


if __name__ == "__main__":
    main()
