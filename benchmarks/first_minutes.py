"""Time the first calls of fresh processes: plain, HF's prompt lookup, and speculative.

Each process loads the model and makes four calls, each with another prompt of one family. The
systems run one process after the other, in turns, `--rounds` times per family; "warm" is
a speculative process that called `warm_up` before. "first run" processes find no functions that
numba compiled earlier, as after an installation.

A line compares the seconds of each call, summed over families, with those of plain's same call, and
has the tokens per forward of all its calls.

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
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import common

import lookahead_hf
from lookahead_hf.tools.cli.commands.env import cpu_name
from lookahead_hf.tools.cli.measuring import timed_call

NUM_CALLS = 4
SPECULATIVE: dict[str, Any] = {"speculative": True}
SYSTEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lookup": {"prompt_lookup_num_tokens": 10},
    "speculative": SPECULATIVE,
    "warm": SPECULATIVE,
    "first run": SPECULATIVE,
}
"""What each system adds to a call of `generate`."""


@dataclass(frozen=True)
class Line:
    """Seconds of each call of a system by those of plain's, and its tokens per forward."""

    system: str
    first: float
    second: float
    third: float
    fourth: float
    tokens_per_step: float


def child(options: argparse.Namespace, system: str, family: str) -> None:
    """Make the calls of one process and print seconds, tokens and steps as a line of JSON."""
    model, tokenizer = common.load(options.model, options.dtype, options.device)
    options.families, options.prompts_per_family = [family], NUM_CALLS * options.batch
    batches = common.chosen_batches(tokenizer, options, options.batch)
    lookahead_hf.enable(model)
    if system == "warm":
        columns = batches[0].inputs["input_ids"].shape[1]
        lookahead_hf.warm_up(model, batch_size=options.batch, context_length=columns, seconds=None)
    shared = common.greedy(tokenizer, options)
    calls = (timed_call(model, batch.inputs | shared | SYSTEMS[system], 0) for batch in batches)
    print(json.dumps([(call.seconds, call.num_tokens, call.forwards - 1) for call in calls]))


def run_child(system: str, family: str) -> list[tuple[float, int, int]]:
    """Run one process and return its calls."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child", system, family]
    with tempfile.TemporaryDirectory() as empty:
        own = {"NUMBA_CACHE_DIR": empty} if system == "first run" else {}
        done = subprocess.run(command, env=os.environ | own, stdout=subprocess.PIPE, text=True)
    done.check_returncode()
    calls: list[tuple[float, int, int]] = json.loads(done.stdout.splitlines()[-1])
    return calls


def line_of(system: str, families: dict[str, dict[str, Any]], rows: int) -> Line:
    """Sum up the calls of all processes, the fastest of each family's rounds."""
    ratios = []
    for at in range(NUM_CALLS):
        ours, plain = (
            sum(min(run[at][0] for run in runs[name]) for runs in families.values())
            for name in (system, "plain")
        )
        ratios.append(ours / plain)
    calls = [call for runs in families.values() for run in runs[system] for call in run]
    steps = sum(num_steps for _, _, num_steps in calls)
    emitted = sum(num_tokens - rows for _, num_tokens, _ in calls)
    return Line(system, *ratios, tokens_per_step=emitted / max(1, steps) / rows)


def main() -> None:
    parser = common.prompts_parser(__doc__, new_tokens=64, batch=1, rounds=2)
    parser.add_argument("--systems", type=common.words, default=list(SYSTEMS))
    parser.add_argument("--child", nargs=2, metavar=("SYSTEM", "FAMILY"), help="internal")
    options = common.parsed(parser, new_tokens=4, systems=["plain", "speculative"])
    if options.child:
        child(options, *options.child)
        return
    names = [name for name in options.systems if options.batch == 1 or name != "lookup"]
    found: dict[str, dict[str, Any]] = {}
    for number in range(options.rounds):
        for at, family in enumerate(options.families or common.read_prompts(None)):
            runs = found.setdefault(family, defaultdict(list))
            shift = (number + at) % len(names)
            for system in names[shift:] + names[:shift]:
                runs[system].append(run_child(system, family))
                print(f"{family} {system}", file=sys.stderr)
    report = common.Report(options, cpu=cpu_name())
    for name in names:
        report.add(line_of(name, found, options.batch))


if __name__ == "__main__":
    main()
