"""The process that compiles: `python -m lookahead_hf.compile drafting common bfloat16`.

Other processes start it, and load what it compiles. For people there is `lookahead-hf compile`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from lookahead_hf.call import optional
from lookahead_hf.ngram_pool import compilation
from lookahead_hf.utils import locked

NICENESS = 10  # Against the threads of a model, which wait for each other


def main(names: Sequence[str]) -> None:
    """Compile some groups of functions, or wait for who does; `AWAITED` may come first."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt at a prompt is not for it
    is_awaited = compilation.AWAITED in names
    if hasattr(os, "nice") and not is_awaited:
        os.nice(NICENESS)
    # While numba looks for a function's type it writes messages that nobody reads, in colour.
    os.environ["NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING"] = "1"
    with compilation.importing_numba():
        from lookahead_hf.ngram_pool import jit
    jit.compile_here()
    # These say what there is to compile.
    import lookahead_hf.drafting.registry  # noqa: F401

    optional.find("cpu kernels")

    with locked(Path(jit.folder_of(jit.writable()), "lookahead_hf.lock")):
        errors = [error for name in names[is_awaited:] if (error := _compiled(name))]
    if errors:
        raise SystemExit("; ".join(errors))


def _compiled(name: str) -> str | None:
    """Compile a group; return why that has failed, None if it has not."""
    try:
        compilation.GROUPS[name].compile()
    except Exception as error:
        return f"{name}: {type(error).__name__}: {error}"
    return None


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
