"""`python -m lookahead_hf.kernels compile`: do the kernels compile, and what do they take?"""

from __future__ import annotations

import argparse
import os
import sys


def main() -> int:
    """Compile every kernel for every target; the number of failures is printed last."""
    parser = argparse.ArgumentParser(prog="python -m lookahead_hf.kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    compiling = commands.add_parser("compile", help="compile ahead of time, without a GPU")
    compiling.add_argument("--target", nargs="+", help="only these, for example sm_90 gfx942")
    compiling.add_argument("--kernel", default="", help="only kernels whose name contains this")
    options = parser.parse_args()
    # Read when a kernel is decorated: an interpreted kernel cannot be compiled.
    os.environ.pop("TRITON_INTERPRET", None)
    from lookahead_hf.kernels.aot import TARGETS

    unknown = set(options.target or ()) - set(TARGETS)
    if unknown:
        parser.error(f"no target {', '.join(sorted(unknown))}: choose from {', '.join(TARGETS)}")
    return _compile(options.target or list(TARGETS), options.kernel)


def _compile(names: list[str], part: str) -> int:
    from lookahead_hf.kernels import aot

    failures = 0
    for variant in aot.variants():
        if part not in variant.name:
            continue
        for name in names:
            try:
                used = aot.compile_variant(variant, aot.TARGETS[name])
            except Exception as error:
                failures += 1
                print(f"{variant.name:56} {name:7} FAILED {type(error).__name__}: {error}")
                continue
            print(
                f"{variant.name:56} {name:7} {_text(used.registers)} registers"
                f" {used.shared_bytes:7} bytes shared {_text(used.spills)} bytes spilled",
                flush=True,
            )
    print(f"{failures} failures")
    return 1 if failures else 0


def _text(number: int | None) -> str:
    return f"{'?' if number is None else number:>4}"


if __name__ == "__main__":
    sys.exit(main())
