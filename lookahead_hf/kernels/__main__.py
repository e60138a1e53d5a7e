"""`python -m lookahead_hf.kernels compile`: do the kernels compile for GPUs that are not here?"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product


def main() -> int:
    """Compile every kernel for every target; print the number of failures last."""
    parser = argparse.ArgumentParser(prog="python -m lookahead_hf.kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    compiling = commands.add_parser("compile", help="compile ahead of time, without a GPU")
    compiling.add_argument("--target", nargs="+", help="only these, for example sm_90 gfx942")
    options = parser.parse_args()
    # Read when a kernel is decorated: an interpreted kernel cannot be compiled.
    os.environ.pop("TRITON_INTERPRET", None)
    from lookahead_hf.kernels.aot import GPUS

    targets = options.target or list(GPUS)
    unknown = set(targets) - set(GPUS)
    if unknown:
        parser.error(f"no target {', '.join(sorted(unknown))}: choose from {', '.join(GPUS)}")
    return compile_for(targets)


def compile_for(targets: list[str]) -> int:
    """Compile every kernel for these targets; return 1 if one fails, else 0."""
    from lookahead_hf.kernels import aot

    failures = 0
    with ProcessPoolExecutor() as pool:
        for lines in pool.map(_compile, product(targets, aot.CASES)):
            failures += sum("FAILED" in line for line in lines)
            print(*lines, sep="\n", flush=True)
    print(f"{failures} failures")
    return 1 if failures else 0


def _compile(job: tuple[str, str]) -> list[str]:
    """Compile the kernels of a case for a target; return what is printed of each."""
    from lookahead_hf.kernels import aot

    target, case = job
    lines = []
    for kernel, made in aot.compile_case(case, aot.GPUS[target]).items():
        failed = f"FAILED {type(made).__name__}: {made}"
        said = failed if isinstance(made, Exception) else f"{made.metadata.shared:>6} bytes shared"
        lines.append(f"{kernel + ': ' + case:64} {target:7} {said}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
