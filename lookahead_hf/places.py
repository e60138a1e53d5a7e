"""Where the package keeps files between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """Return the folder of everything that is kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "lookahead_hf"
