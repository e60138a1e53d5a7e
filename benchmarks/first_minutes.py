"""Time the first calls of fresh processes: plain, HF's prompt lookup, and speculative.

Each process loads the model and makes four calls, each with another prompt of one family. The
systems run one process after the other, in turns, `--rounds` times per family and batch; "warm" is
a speculative process that called `warm_up` before. "first run" processes find no functions that
numba compiled earlier, as after an installation.

The first table compares seconds per call, summed over families, with those of plain. The second
shows the tokens per forward of the speculative calls and of prompt lookup in each family.

    python benchmarks/first_minutes.py --rounds 2 --json first.json
    python benchmarks/first_minutes.py --families rag,chat --batch 4 --dtype float32
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import common

import lookahead_hf
from lookahead_hf.tools.cli.commands.env import cpu_name
from lookahead_hf.tools.cli.measuring import timed_call

NUM_CALLS = 4

SYSTEMS = ("plain", "lookup", "speculative", "warm", "first run")

ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lookup": {"prompt_lookup_num_tokens": 10},
    "speculative": {"speculative": True},
    "warm": {"speculative": True},
    "first run": {"speculative": True},
}
"""What each system adds to a call of `generate`."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = common.model_parser(__doc__)
    parser.add_argument("--families", type=lambda text: text.split(","), metavar="NAME,NAME")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first of each family")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEMS))
    parser.add_argument("--json", type=Path, help="write every call there")
    parser.add_argument("--child", nargs=3, metavar=("SYSTEM", "FAMILY", "ROWS"), help="internal")
    return parser.parse_args(argv)


def child(arguments: argparse.Namespace) -> None:
    """Make the calls of one process and print them as a line of JSON."""
    system, family, rows = arguments.child[0], arguments.child[1], int(arguments.child[2])
    model, tokenizer = common.load(arguments.model, arguments.dtype, arguments.device)
    prompts = common.read_prompts([family])
    chosen = slice(arguments.skip, arguments.skip + NUM_CALLS * rows)
    batches = list(common.batches(tokenizer, prompts, chosen, rows))[:NUM_CALLS]
    lookahead_hf.enable(model)
    if system == "warm":
        lookahead_hf.warm_up(
            model, batch_size=rows, context_length=common.num_columns(batches[0]), seconds=None
        )
    shared = {
        "max_new_tokens": arguments.new_tokens,
        "pad_token_id": tokenizer.pad_token_id,
        "do_sample": False,
    }
    calls = []
    for batch in batches:
        call = timed_call(model, batch.inputs | shared | ARGUMENTS[system], 0)
        calls.append(
            {"seconds": call.seconds, "tokens": call.num_tokens, "steps": call.forwards - 1}
        )
    print(json.dumps(calls))


def run_child(arguments: argparse.Namespace, system: str, family: str, rows: int) -> list[Any]:
    """Run one process and return its calls."""
    command = [sys.executable, __file__, "--child", system, family, str(rows)]
    command += ["--new-tokens", str(arguments.new_tokens), "--skip", str(arguments.skip)]
    for name in ("model", "dtype", "device"):
        value = getattr(arguments, name)
        command += [f"--{name}", str(value)] if value is not None else []
    with tempfile.TemporaryDirectory() as empty:
        env = dict(os.environ)
        if system == "first run":
            env["NUMBA_CACHE_DIR"] = empty
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    calls: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return calls


def print_tables(results: dict[tuple[str, str, int], list[list[Any]]], rows: int) -> None:
    """Print both tables of one batch size."""
    systems = [
        name for name in SYSTEMS if any(key[0] == name and key[2] == rows for key in results)
    ]
    families = sorted({key[1] for key in results if key[2] == rows})
    seconds = {
        system: [
            sum(
                min(run[at]["seconds"] for run in results[system, family, rows])
                for family in families
            )
            for at in range(NUM_CALLS)
        ]
        for system in systems
    }
    print(f"\nbatch {rows}: seconds of each call by those of plain (the same call)")
    for system in systems:
        ratios = [
            each / plain for each, plain in zip(seconds[system], seconds["plain"], strict=True)
        ]
        print(f"{system:12s} " + "  ".join(f"{ratio:5.2f}" for ratio in ratios))
    print(f"batch {rows}: tokens per forward, call by call")
    for family in families:
        for system in systems:
            if system == "plain":
                continue
            runs = results[system, family, rows]
            per_step = [
                (sum(run[at]["tokens"] for run in runs) - rows * len(runs))
                / max(1, sum(run[at]["steps"] for run in runs))
                / rows
                for at in range(NUM_CALLS)
            ]
            print(f"{family:14s} {system:12s} " + "  ".join(f"{each:5.2f}" for each in per_step))


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    if arguments.child:
        child(arguments)
        return
    families = arguments.families or list(common.read_prompts(None))
    results: dict[tuple[str, str, int], list[list[Any]]] = defaultdict(list)
    began = time.strftime("%Y-%m-%d")
    for rows in arguments.batch:
        names = [name for name in arguments.systems if rows == 1 or name != "lookup"]
        for number in range(arguments.rounds):
            for at, family in enumerate(families):
                shift = (number + at) % len(names)
                for system in names[shift:] + names[:shift]:
                    calls = run_child(arguments, system, family, rows)
                    results[system, family, rows].append(calls)
                    print(f"{rows} {family} {system}", file=sys.stderr)
                if arguments.json:
                    lines = [
                        {"system": key[0], "family": key[1], "rows": key[2], "runs": runs}
                        for key, runs in results.items()
                    ]
                    about = {
                        "date": began,
                        "cpu": cpu_name(),
                        "command": " ".join(sys.argv[1:]),
                        "lines": lines,
                    }
                    arguments.json.write_text(json.dumps(about, indent=1))
        print_tables(results, rows)


if __name__ == "__main__":
    main()
