"""Generators of random numbers: their states, and those of a text."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any

import torch

_LOCK = threading.Lock()
"""Held while a default generator is read and moved."""

_CHECKPOINT = 64
"""Number of draws between generator states that are kept for the whole call."""

_RECENT = 1024
"""Number of newest generator states that are kept as well; a CPU state takes 5 KB."""


def default_generator(device: torch.device | str) -> torch.Generator:
    """Return the generator that `torch.multinomial` draws from on `device`.

    Raises:
        ValueError: The device type keeps no list of default generators.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", None)
    if not generators:
        raise ValueError(f"no default generator is known for {device}; sample without speculation")
    return generators[module.current_device() if device.index is None else device.index]


@lru_cache(maxsize=16)
def same_as_multinomial(device: torch.device) -> bool:
    """Return whether `argmax(probs / noise)` equals `torch.multinomial`, generator state included.

    This depends on torch's implementation, so it is tested once per device, on a private generator.
    """
    try:
        default_generator(device)
        drawn, kept = (torch.Generator(device).manual_seed(7) for _ in range(2))
        probs = torch.rand(3, 4099, generator=torch.Generator().manual_seed(7)).to(device)
        tokens = torch.multinomial(probs, 1, generator=drawn).squeeze(1)
        noise = torch.empty_like(probs).exponential_(generator=kept)
        same_state = torch.equal(drawn.get_state(), kept.get_state())
        return same_state and torch.equal((probs / noise).argmax(-1), tokens)
    except (RuntimeError, ValueError):
        return False


def refuse_unless(is_distribution: bool) -> None:
    """Raise torch's error about probabilities that are not finite, where plain would."""
    if not is_distribution:
        torch.multinomial(torch.tensor([float("nan")]), 1)


class SavedGenerator:
    """Sets a default generator aside while a call draws from a copy of it.

    The generator gets an unrelated state, so that other draws meanwhile (another call, another
    thread) do not repeat the call's numbers.

    Attributes:
        begin: The generator's state before.
    """

    def __init__(self, device: torch.device) -> None:
        self._generator = default_generator(device)
        with _LOCK:
            self.begin = self._generator.get_state()
            self._state = _far_from(self.begin, device)
            self._generator.set_state(self._state)

    def put_back(self, state: torch.Tensor) -> None:
        """Set the generator to a state, unless something else has drawn from it since."""
        with _LOCK:
            if torch.equal(self._generator.get_state(), self._state):
                self._generator.set_state(state)


class Replay:
    """A generator that can return to the state before any of its draws.

    It keeps its newest states, and every sixty-fourth.

    Attributes:
        at: Draws before the present state.
    """

    def __init__(self, generator: torch.Generator, begin: torch.Tensor) -> None:
        self.generator = generator
        self.generator.set_state(begin)
        self.at = 0
        self._states = {0: begin}  # by the number of draws before them
        self._recent: deque[int] = deque()

    def back_to(self, draw: int) -> None:
        """Go to the newest known state at or before `draw`."""
        known = min(draw, max(self._states))
        while known not in self._states:
            known -= 1
        if not known <= self.at <= draw:
            self.generator.set_state(self._states[known])
            self.at = known

    def drew(self) -> None:
        """Note that one more draw was made."""
        self.at += 1
        self._states[self.at] = self.generator.get_state()
        self._recent.append(self.at)
        if len(self._recent) > _RECENT and (oldest := self._recent.popleft()) % _CHECKPOINT:
            self._states.pop(oldest, None)


def _far_from(state: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a generator state that leads to unrelated random numbers."""
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little")).get_state()


_taken = threading.RLock()
"""Held while the default generators have a text's state."""


def _renew_lock() -> None:
    """Replace the lock, which nobody would release in a forked process."""
    global _taken
    _taken = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class OwnGenerators:
    """Default generators in the state in which `generate` alone would have them, for one text.

    A text waits while that of another thread has the default generators.
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
        with _taken, torch.random.fork_rng(self._devices, device_type=self._kind):
            self._put()
            try:
                yield
            finally:
                of_devices = map(self._module.get_rng_state, self._devices)
                self._states = [torch.get_rng_state(), *of_devices]

    def _put(self) -> None:
        """Set the default generators to the text's latest state."""
        if not self._states:
            (torch.default_generator if self._on_cpu else torch.random).manual_seed(self._seed)
            return
        torch.set_rng_state(self._states[0])
        for device, state in zip(self._devices, self._states[1:], strict=True):
            self._module.set_rng_state(state, device)


def drawing(device: torch.device, seed: int | None) -> AbstractContextManager[Any]:
    """Let a text draw from the default generators inside, from its seed on if it has one.

    No text of another thread puts its state into them meanwhile.
    """
    return _taken if seed is None else OwnGenerators(device, seed).in_place()
