"""Finds the widths at which the model's own code is faster than the kernels.

On every machine that was measured the kernels were faster at each width that they take. None of
these has AMX or the float16 arithmetic of AVX-512, which torch uses for products. The kernels use
AMX, too, but were measured with it as a prototype only. Steps are therefore timed both ways on
machines with such instructions for the dtype of the layers, and only there. This was never run on
such a machine.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

clock = time.perf_counter

REPEATS = 3
"""Forwards of each way in a step that is timed, in turns."""

STEPS = 2
"""Timed steps of a width. The model's own code has to win in all of them."""

MARGIN = 0.85
"""The own code is faster if it takes less than this share of the kernels' time."""


INSTRUCTIONS = {torch.bfloat16: "amx-bf16", torch.float16: "avx512fp16"}
"""Those with which torch may be faster, by LLVM's names."""


@lru_cache
def has_own_instructions(dtype: torch.dtype) -> bool:
    """Return whether this machine has instructions with which torch may be faster."""
    from llvmlite import binding

    return bool(binding.get_host_cpu_features().get(INSTRUCTIONS.get(dtype, "")))


class Trial:
    """Timings of one model by the width of a step: its tokens rounded up to a power of two."""

    def __init__(self, dtypes: set[torch.dtype]) -> None:
        """Begin without timings; `dtypes` are those of the layers."""
        self._is_wanted = any(map(has_own_instructions, dtypes))
        self._wins: dict[int, list[bool]] = defaultdict(list)

    @property
    def lost(self) -> frozenset[int]:
        """The widths at which the model's own code is faster."""
        known = self._wins.items()
        return frozenset(of for of, wins in known if len(wins) == STEPS and not any(wins))

    def is_due(self, width: int) -> bool:
        """Return whether a step of this width is to be timed."""
        return self._is_wanted and len(self._wins[width]) < STEPS

    def time(self, width: int, own: Callable[[], Any], ours: Callable[[], Any]) -> None:
        """Time a step of this width, run by the model's own code and by the kernels."""
        seconds: list[list[float]] = [[], []]
        for _ in range(REPEATS):
            for way, spent in zip((own, ours), seconds, strict=True):
                start = clock()
                way()
                spent.append(clock() - start)
        by_own, by_kernels = map(min, seconds)
        self._wins[width].append(by_own > MARGIN * by_kernels)


def width_of(num_tokens: int) -> int:
    """Return the width of a step of `num_tokens` tokens."""
    return 1 << (num_tokens - 1).bit_length()
