"""Measure the resident memory of processes that call a model plainly, and speculatively.

Each process loads the model and answers the same prompts; memory is read from the system after
garbage is collected and freed memory returned, so that other processes do not disturb it.

    python benchmarks/memory.py --dtypes bfloat16 float32
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from pathlib import Path

import common

import lookahead_hf
from lookahead_hf.model.state import return_memory

NUM_PROMPTS = 4

SYSTEMS = {
    "plain": {},
    "speculative": {"speculative": True},
    "speculative, without compiled layers": {"speculative": {"compiled_layers": False}},
}
"""What each process adds to a call of `generate`."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = common.model_parser(__doc__)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, help="of torch (default: torch's own choice)")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--child", choices=SYSTEMS, help="internal")
    return parser.parse_args()


def resident() -> float:
    """MB that this process holds in memory."""
    gc.collect()
    return_memory()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1000


def measure(arguments: argparse.Namespace) -> list[float]:
    """MB before the model is loaded, with it, after the calls, and after `disable`."""
    found = [resident()]
    model, tokenizer = common.load(
        arguments.model, arguments.dtype, arguments.device, arguments.threads
    )
    found.append(resident())
    lookahead_hf.enable(model)
    prompts = [text for each in common.read_prompts(None).values() for text in each[:1]]
    for prompt in prompts[:NUM_PROMPTS]:
        inputs = common.encode(tokenizer, [prompt])
        limits = {"max_new_tokens": arguments.new_tokens, "do_sample": False}
        model.generate(**inputs, **limits, **SYSTEMS[arguments.child])
    found.append(resident())
    lookahead_hf.disable(model)
    return [*found, resident()]


def main() -> None:
    """Print a table of all processes."""
    arguments = parse_arguments()
    if arguments.child:
        print(*measure(arguments))
        return
    print("| dtype | calls | process | with the model | after the calls | after `disable` |")
    print("|---|---|---|---|---|---|")
    for dtype in arguments.dtypes:
        for system in SYSTEMS:
            own = ["--dtype", dtype, "--child", system, *sys.argv[1:]]
            command = [sys.executable, __file__, *own]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            sizes = " | ".join(f"{float(each):,.0f}" for each in printed.splitlines()[-1].split())
            print(f"| {dtype} | {system} | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
