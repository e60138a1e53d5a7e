"""`python -m lookahead_hf.kernels compile`: do the kernels compile, and what do they take?"""

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
    compiling.add_argument("--kernel", default="", help="only kernels whose name contains this")
    compiling.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="processes that compile (default: all)",
    )
    options = parser.parse_args()
    # Read when a kernel is decorated: an interpreted kernel cannot be compiled.
    os.environ.pop("TRITON_INTERPRET", None)
    from lookahead_hf.kernels.aot import GPUS

    unknown = set(options.target or ()) - set(GPUS)
    if unknown:
        parser.error(f"no target {', '.join(sorted(unknown))}: choose from {', '.join(GPUS)}")
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}: at least one process has to compile")
    return _compile(options.target or list(GPUS), options.kernel, options.jobs)


def _compile(targets: list[str], part: str, jobs: int) -> int:
    from lookahead_hf.kernels import aot

    todo = [
        (target, index, launch.name)
        for target in targets
        for index, launch in enumerate(aot.launches(aot.GPUS[target]))
        if part in launch.name
    ]
    gpus = [aot.GPUS[target] for target, _, _ in todo]
    failures = 0
    with ProcessPoolExecutor(jobs) as pool:
        done = pool.map(_one, gpus, [index for _, index, _ in todo])
        for (target, _, name), (compiles, text) in zip(todo, done, strict=True):
            failures += not compiles
            print(f"{name:64} {target:7} {text}", flush=True)
    print(f"{failures} failures")
    return 1 if failures else 0


def _one(gpu: Gpu, index: int) -> tuple[bool, str]:
    """Compile one kernel for one GPU; return whether it compiles, and what it takes."""
    from lookahead_hf.kernels import aot

    try:
        return True, aot.compile_launch(aot.launches(gpu)[index], gpu)
    except Exception as error:
        return False, f"FAILED {type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
