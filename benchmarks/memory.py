"""Measure the resident memory of processes that call a model plainly, and speculatively.

Each process loads the model and answers the same prompts; memory is read from the system after
garbage is collected and freed memory returned, so that other processes do not disturb it.

    python benchmarks/memory.py --dtypes bfloat16,float32
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common

import lookahead_hf
from lookahead_hf.model.state import return_memory

NUM_PROMPTS = 4
SYSTEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "speculative": {"speculative": True},
    "speculative, without compiled layers": {"speculative": {"compiled_layers": False}},
}
"""What each process adds to a call of `generate`."""


@dataclass(frozen=True)
class Line:
    """MB that a process holds before the model is loaded, with it, and so on."""

    dtype: str
    calls: str
    process: float
    with_the_model: float
    after_the_calls: float
    after_disable: float


def resident() -> float:
    """MB that this process holds in memory."""
    gc.collect()
    return_memory()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1000


def measure(options: argparse.Namespace) -> list[float]:
    """The numbers of a line."""
    found = [resident()]
    model, tokenizer = common.load(options.model, options.dtype, options.device)
    found.append(resident())
    lookahead_hf.enable(model)
    options.prompts_per_family = 1
    shared = common.greedy(tokenizer, options) | SYSTEMS[options.child]
    for batch in common.chosen_batches(tokenizer, options)[:NUM_PROMPTS]:
        model.generate(**batch.inputs, **shared)
    found.append(resident())
    lookahead_hf.disable(model)
    return [*found, resident()]


def main() -> None:
    """Print a table of all processes."""
    parser = common.prompts_parser(__doc__, new_tokens=64)
    parser.add_argument("--dtypes", type=common.words, default=["bfloat16", "float32"])
    parser.add_argument("--child", choices=SYSTEMS, help="internal")
    options = common.parsed(parser, dtypes=["float32"])
    if options.child:
        print(json.dumps(measure(options)))
        return
    report = common.Report(options)
    for dtype in options.dtypes:
        for system in SYSTEMS:
            own = ["--dtype", dtype, "--child", system]
            command = [sys.executable, __file__, *sys.argv[1:], *own]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            report.add(Line(dtype, system, *json.loads(printed.splitlines()[-1])))


if __name__ == "__main__":
    main()
