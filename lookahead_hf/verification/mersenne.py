"""Exponential noise of a CPU generator at a few places, without the logarithm of all the others.

Truncated sampling leaves a few dozen tokens of fifty thousand, so plain's draw spends nearly all
its time on noise that decides nothing. The Mersenne Twister still has to run through every number,
which numpy does: 0.35 ms for 49,152 tokens, 0.92 with the logarithms.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch

_STATE = np.dtype(
    {
        "names": ["left", "next", "key"],
        "formats": ["<i4", "<u8", ("<u8", 624)],
        "offsets": [8, 16, 24],
        "itemsize": 5056,
    }
)
"""The fields that move, in the bytes of `torch.Generator.get_state()`."""


class RawBlock:
    """The random numbers behind one block of exponential noise."""

    def __init__(self, numbers: np.ndarray) -> None:
        """`numbers`: two 32-bit numbers per element, [2 * elements]."""
        self._numbers = numbers.astype(np.uint32)

    def uniform(self, elements: np.ndarray | slice) -> np.ndarray:
        """The uniform numbers that noise is made of: elements of the flattened block, [n]."""
        pairs = self._numbers.reshape(-1, 2)[elements]
        # Of 64 bits, the first number above the second, torch uses the lower 53.
        high = pairs[:, 0] & np.uint32((1 << 21) - 1)
        return high * 2.0**-21 + pairs[:, 1] * 2.0**-53

    def exponential(self, elements: np.ndarray) -> np.ndarray:
        """Noise of some elements of the flattened block, [n] float32, as torch computes it."""
        return np.array([-math.log1p(-u) for u in self.uniform(elements).tolist()], np.float32)


class Twister:
    """Draws raw blocks; keeps the object that runs through the numbers."""

    def __init__(self) -> None:
        self._numbers = np.random.MT19937(0)

    def draw(self, generator: torch.Generator, elements: int) -> RawBlock:
        """What `exponential_` of so many elements draws; moves the generator as it would.

        Args:
            generator: A CPU generator that no other thread uses.
            elements: Elements of the block.
        """
        state = generator.get_state()
        fields = state.numpy().view(_STATE)[0]
        # torch counts what is left before its next refill, numpy where it reads next.
        at = 624 if fields["left"] == 1 else int(fields["next"])
        self._numbers.state = {
            "bit_generator": "MT19937",
            "state": {"key": fields["key"].astype(np.uint32), "pos": at},
        }
        block = RawBlock(self._numbers.random_raw(2 * elements))
        after = self._numbers.state["state"]
        fields["key"], fields["next"] = after["key"], after["pos"]
        fields["left"] = 625 - after["pos"]
        generator.set_state(state)
        return block


@lru_cache(maxsize=1)
def is_exact() -> bool:
    """Whether this torch draws as written here, tried once on generators of its own."""
    twister = Twister()
    theirs, ours = (torch.Generator().manual_seed(11) for _ in range(2))
    if theirs.get_state().numel() != _STATE.itemsize:
        return False
    for elements in (3, 5000, 312):
        drawn = torch.empty(elements).exponential_(generator=theirs).numpy()
        noise = twister.draw(ours, elements).exponential(np.arange(elements))
        if not np.array_equal(noise, drawn):
            return False
    return torch.equal(theirs.get_state(), ours.get_state())
