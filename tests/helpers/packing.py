"""Whether this machine can pack weights."""

from __future__ import annotations

import pytest
import torch

from lookahead_hf.runner import packed_linear


def needs_packing() -> None:
    try:
        packed_linear.packed(((torch.zeros(8, 8, dtype=torch.bfloat16), None),))
    except RuntimeError:
        pytest.skip("this processor has no packed layout for bfloat16")
