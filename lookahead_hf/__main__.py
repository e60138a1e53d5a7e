"""Run the command line: `python -m lookahead_hf` is `lookahead-hf`."""

from __future__ import annotations

import sys

from lookahead_hf.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
