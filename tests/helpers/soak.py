"""Random calls of every kind for some time, in a process of their own, and what memory they take.

`python -m tests.helpers.soak 3600` runs for an hour.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.model.state import return_memory
from lookahead_hf.ngram_pool import NgramPool
from tests.helpers.compiled import in_threads
from tests.helpers.models import prompt, tiny
from tests.helpers.requests import prompts, settings

NAMES = ("llama", "qwen3", "mistral", "gemma3", "gpt2")


def resident() -> int:
    """Bytes that the process holds in memory, when garbage and freed memory are gone."""
    gc.collect()
    return_memory()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Soak:
    """Random calls on models that stay, and on some that go."""

    def __init__(self, seconds: float) -> None:
        self._random, self._seconds = random.Random(0), seconds
        self._models = [lookahead_hf.enable(tiny(name)) for name in NAMES]
        self._pool = NgramPool(max_tokens=4096)
        self.num_calls, self.num_accepted = 0, 0
        self.sizes: list[tuple[int, int]] = []  # calls so far and resident bytes, now and then

    def run(self) -> None:
        """Make calls until the time is over."""
        kinds: list[Callable[[], None]] = [self._alone] * 24
        kinds += [self._together, self._in_threads, self._dropped] * 2
        end = time.monotonic() + self._seconds
        while time.monotonic() < end:
            for kind in self._random.sample(kinds, 8):
                kind()
            self.sizes.append((self.num_calls, resident()))

    @property
    def growth(self) -> float:
        """Bytes per call after the first third: the median between neighbouring sizes.

        What torch, the allocator and the pool keep for good is taken in a few leaps; a leak is in
        every size.
        """
        late = self.sizes[len(self.sizes) // 3 :]
        return median((b - a) / (n - m) for (m, a), (n, b) in pairwise(late))

    def _call(self, model: Any, ids: torch.Tensor, **own: Any) -> None:
        drafters = self._random.choice([None, "pool"])
        shared = {"pool": self._pool, "learn": True} if drafters == "pool" else {}
        compiled = self._random.random() < 0.5
        config = SpeculativeConfig(drafters, budget=8, compiled_layers=compiled, **shared)
        given = {"max_new_tokens": self._random.randint(4, 48), "pad_token_id": 0, **own}
        if self._random.random() < 0.5:
            given |= {"do_sample": True, "temperature": 0.7}
        output = model.generate(ids, **given, speculative=config, return_dict_in_generate=True)
        stats = output.speculative_stats
        assert stats.fallback_reason is None
        self.num_calls += 1
        self.num_accepted += stats.num_accepted

    def _alone(self, model: Any = None) -> None:
        model = model or self._random.choice(self._models)
        rows, length = self._random.choice([1, 2, 4]), self._random.randint(1, 40)
        mask = torch.ones(rows, length, dtype=torch.long)
        mask[-1, : self._random.randrange(length)] = 0
        ids = prompt(rows, length, self._random.randrange(99))
        self._call(model, ids, attention_mask=mask)

    def _together(self) -> None:
        model = self._models[0]
        found = model.generate_batch(prompts(4), settings(model), speculative=True)
        assert not any(output.error for output in found.values())
        self.num_calls += len(found)

    def _in_threads(self) -> None:
        chosen = self._random.choices(self._models, k=3)
        in_threads(*(partial(self._alone, model) for model in chosen))

    def _dropped(self) -> None:
        self._alone(lookahead_hf.enable(tiny(self._random.choice(NAMES))))


def main(seconds: float) -> None:
    """Run, and print what came of it as JSON."""
    torch.set_num_threads(1)
    soak = Soak(seconds)
    soak.run()
    found = {"num_calls": soak.num_calls, "num_accepted": soak.num_accepted}
    late = [size for _, size in soak.sizes[len(soak.sizes) // 3 :]]
    sizes = {"bytes_after_a_third": late[0], "bytes_at_the_end": late[-1]}
    print(json.dumps({**found, **sizes, "bytes_per_call": soak.growth}))


if __name__ == "__main__":
    main(float(sys.argv[1]))
