"""Gives each text of a run its own state of the default random generators."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lookahead_hf.verification import rng

_taken = threading.RLock()
"""Held while the default generators have a text's state. No thread waits for it."""


def _renew_lock() -> None:
    """Replace the lock, which nobody would release in a forked process."""
    global _taken
    _taken = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class OwnGenerators:
    """Default generators in the state in which `generate` alone would have them, for one text.

    If another thread's text has the default generators, this text draws from separate ones. It must
    not wait, since a processor of the other text may wait for this one.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        """Begin where `torch.manual_seed(seed)` puts the generators of the model's device."""
        self._on_cpu = device.type == "cpu"
        self._kind = "cuda" if self._on_cpu else device.type
        self._devices = [] if self._on_cpu else [*range(self._module.device_count())]
        self._seed = seed
        self._states: list[torch.Tensor] = []  # of the CPU and of every device, once used

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self._kind)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let this thread draw from the text's generators inside."""
        taken = _taken
        if rng.on_own_generators() or not taken.acquire(blocking=False):
            with self._on_thread():
                yield
            return
        try:
            with torch.random.fork_rng(self._devices, device_type=self._kind):
                self._put()
                try:
                    yield
                finally:
                    of_devices = map(self._module.get_rng_state, self._devices)
                    self._states = [torch.get_rng_state(), *of_devices]
        finally:
            taken.release()

    @contextmanager
    def _on_thread(self) -> Iterator[None]:
        """Let only this thread draw from the text's generators inside."""
        places = [torch.device("cpu"), *(torch.device(self._kind, i) for i in self._devices)]
        states = self._states or [
            torch.Generator(place).manual_seed(self._seed).get_state() for place in places
        ]
        with rng.ThreadGenerators(dict(zip(places, states, strict=True))) as own:
            try:
                yield
            finally:
                self._states = [generator.get_state() for generator in own.by_device.values()]

    def _put(self) -> None:
        """Set the default generators to the text's latest state."""
        if not self._states:
            (torch.default_generator if self._on_cpu else torch.random).manual_seed(self._seed)
            return
        torch.set_rng_state(self._states[0])
        for device, state in zip(self._devices, self._states[1:], strict=True):
            self._module.set_rng_state(state, device)
