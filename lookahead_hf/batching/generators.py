"""The default random generators, which all runs share, as one text finds them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_drawing = threading.RLock()
"""Held while the generators are those of a text."""


def _renew_lock() -> None:
    """Make the lock anew: in a forked process, nobody is left to release it."""
    global _drawing
    _drawing = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class OwnGenerators:
    """Lets a text draw from the default generators what it draws alone after `manual_seed`."""

    def __init__(self, device: torch.device, seed: int) -> None:
        """Begin where `torch.manual_seed(seed)` would put the generators.

        Args:
            device: The device of the model.
            seed: The seed of the text.
        """
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
        """Let the default generators be those of the text inside, and what they were behind it."""
        with _drawing, torch.random.fork_rng(self._devices, device_type=self._kind):
            self._put()
            try:
                yield
            finally:
                of_devices = map(self._module.get_rng_state, self._devices)
                self._states = [torch.get_rng_state(), *of_devices]

    def _put(self) -> None:
        """Set the generators to the states that the text has left them in."""
        if not self._states:
            (torch.default_generator if self._on_cpu else torch.random).manual_seed(self._seed)
            return
        torch.set_rng_state(self._states[0])
        for device, state in zip(self._devices, self._states[1:], strict=True):
            self._module.set_rng_state(state, device)
