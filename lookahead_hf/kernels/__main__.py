"""`python -m lookahead_hf.kernels compile`: do the kernels compile, and what do they take?"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lookahead_hf.kernels.aot import Gpu, Usage


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
        (target, aot.GPUS[target], index, launch.name)
        for target in targets
        for index, launch in enumerate(aot.launches(aot.GPUS[target]))
        if part in launch.name
    ]
    failures = 0
    with ProcessPoolExecutor(jobs) as pool:
        for (target, _, _, name), (used, said) in zip(todo, pool.map(_one, todo), strict=True):
            failures += used is None
            what = f"FAILED {said}" if used is None else _text(used)
            print(f"{name:64} {target:7} {what}", flush=True)
    print(f"{failures} failures")
    return 1 if failures else 0


def _one(todo: tuple[str, Gpu, int, str]) -> tuple[Usage | None, str]:
    """Compile one kernel for one GPU; return what it takes, or None and what went wrong."""
    from lookahead_hf.kernels import aot

    _, gpu, index, _ = todo
    try:
        return aot.compile_launch(aot.launches(gpu)[index], gpu), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _text(used: Usage) -> str:
    amd = used.spilled is not None
    rest = (used.spilled, "registers spilled") if amd else (used.stack_bytes, "bytes stack")
    columns = (used.registers, "registers"), (used.shared_bytes, "bytes shared"), rest
    return " ".join(f"{'?' if number is None else number:>6} {unit}" for number, unit in columns)


if __name__ == "__main__":
    sys.exit(main())
