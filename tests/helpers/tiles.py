"""Products by tiles on any processor: the kernels' own code over loops in place of instructions."""

from __future__ import annotations

import pytest
import torch

from lookahead_hf.engines.cpu.kernels import program
from lookahead_hf.ngram_pool import compilation


def use_loops(patch: pytest.MonkeyPatch) -> None:
    """Have bfloat16 layers computed by tiles, which loops multiply."""
    group = compilation.kernels["bfloat16_loops"]
    compilation.wait([group])
    group.check_available()
    patch.setattr(program, "tiles_of", lambda of: "_loops" if of is torch.bfloat16 else "")
