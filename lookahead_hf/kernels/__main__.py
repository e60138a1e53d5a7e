"""`python -m lookahead_hf.kernels compile`: do the kernels compile for GPUs that are not here?"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lookahead_hf.kernels.aot import Gpu


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

    jobs = [
        (aot.GPUS[target], index, f"{launch.name:64} {target:7}")
        for target in targets
        for index, launch in enumerate(aot.launches(aot.GPUS[target]))
    ]
    failures = 0
    with ProcessPoolExecutor() as pool:
        for compiles, line in pool.map(_compile, jobs):
            failures += not compiles
            print(line, flush=True)
    print(f"{failures} failures")
    return 1 if failures else 0


def _compile(job: tuple[Gpu, int, str]) -> tuple[bool, str]:
    """Compile one kernel for one GPU; return whether it compiles, and what is printed."""
    from lookahead_hf.kernels import aot

    gpu, index, name = job
    try:
        return True, f"{name} {aot.compile_launch(aot.launches(gpu)[index], gpu):>6} bytes shared"
    except Exception as error:
        return False, f"{name} FAILED {type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
