"""The noise that plain `generate` draws at a decoding step, in any order: same seed, same text.

`torch.multinomial(probs, 1)` divides the probabilities by exponential noise and takes the argmax.
Plain draws one `[rows, vocab]` block of that noise per decoding step, finished rows included. A row
at its own step t that reads its row of block t picks plain's token, whatever the other rows do.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from lookahead_hf.runner.outputs import pinned

_LOCK = threading.Lock()  # Held while a default generator is read and moved
_CHECKPOINT = 8  # Number of draws between generator states that are kept; a CPU state takes 5 KB


def default_generator(device: torch.device | str) -> torch.Generator:
    """Return the generator that `torch.multinomial` draws from; ValueError if there is none."""
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
            digest = hashlib.blake2b(self.begin.numpy().tobytes(), digest_size=7).digest()
            unrelated = torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
            self._state = unrelated.get_state()
            self._generator.set_state(self._state)

    def put_back(self, state: torch.Tensor) -> None:
        """Set the generator to a state, unless something else has drawn from it since."""
        with _LOCK:
            if torch.equal(self._generator.get_state(), self._state):
                self._generator.set_state(state)


class Replay:
    """A generator that can return to the state before any of its draws."""

    def __init__(self, generator: torch.Generator, begin: torch.Tensor) -> None:
        self.generator = generator
        self.generator.set_state(begin)
        self.at = 0  # draws before the present state
        self._states = [begin]  # of every `_CHECKPOINT` draws

    def back_to(self, draw: int) -> None:
        """Go to the newest known state at or before `draw`."""
        known = min(draw // _CHECKPOINT, len(self._states) - 1)
        if not known * _CHECKPOINT <= self.at <= draw:
            self.generator.set_state(self._states[known])
            self.at = known * _CHECKPOINT

    def drew(self) -> None:
        self.at += 1
        if self.at == len(self._states) * _CHECKPOINT:
            self._states.append(self.generator.get_state())


_taken = threading.RLock()  # Held while the default generators have a text's state


if hasattr(os, "register_at_fork"):  # nobody would release the lock in a forked process
    os.register_at_fork(after_in_child=lambda: globals().update(_taken=threading.RLock()))


def fresh_seed() -> int:
    """Return a seed, from the default generator unless a text of another thread has it."""
    if not _taken.acquire(blocking=False):
        return int.from_bytes(os.urandom(3), "little")
    try:
        return int(torch.randint(2**31, ()))
    finally:
        _taken.release()


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


class Noise:
    """Noise blocks of one call in any order, drawn on a private copy of the default generator.

    `finish` puts the default generator where plain leaves it, unless somebody else has moved it.
    """

    def __init__(
        self,
        num_rows: int,
        vocab: int,
        device: torch.device | str,
        *,
        max_bytes: int = 64 << 20,
        seed: int | None = None,
    ) -> None:
        """Begin in the state of the default generator, or after `manual_seed(seed)`.

        With a seed the default generator is left alone. The newest blocks take `max_bytes` of
        memory; at least two are kept.
        """
        self._shape = (num_rows, vocab)
        self._device = torch.device(device)
        self._max_blocks = max(2, max_bytes // (4 * num_rows * vocab))
        self._blocks: dict[int, torch.Tensor] = {}  # the newest last
        self._saved: SavedGenerator | None = None
        generator = torch.Generator(self._device)
        if seed is None:
            self._saved = SavedGenerator(self._device)
            begin = self._saved.begin
        else:
            begin = generator.manual_seed(seed).get_state()
        self._replay = Replay(generator, begin)

    def block(self, step: int) -> torch.Tensor:
        """Return plain's noise at a step, 0 after the prefill, [rows, vocab] float32; read only."""
        if step not in self._blocks:
            self._go_to(step)
            self._draw()
        return self._blocks[step]

    def blocks(self, steps: np.ndarray, depths: int) -> torch.Tensor:
        """Return each row's noise at its own step, [rows], and the next, [rows, depths, vocab]."""
        rows, vocab = self._shape
        wanted = (steps[:, None] + np.arange(depths)).reshape(-1)  # [rows * depths]
        order = np.argsort(wanted, kind="stable")
        places = pinned(np.stack([order, order // depths]), self._device)
        index = places.to(self._device, non_blocking=True)
        out = torch.empty(rows * depths, vocab, dtype=torch.float32, device=self._device)
        firsts = np.flatnonzero(np.diff(wanted[order], prepend=-1))
        for first, end in zip(firsts.tolist(), [*firsts[1:].tolist(), len(order)], strict=True):
            to, of = index[:, first:end]
            out.index_copy_(0, to, self.block(int(wanted[order[first]])).index_select(0, of))
        return out.view(rows, depths, vocab)

    def pick(self, probs: torch.Tensor, row: int, step: int) -> int:
        """Return the token that plain picks for a row with these probabilities, [vocab], at a step.

        This copies to the host once. RuntimeError, as of torch, if they are not finite.
        """
        best = (probs / self.block(step)[row]).max(-1)
        ratio, token = torch.stack([best.values.double(), best.indices.double()]).tolist()
        refuse_unless(math.isfinite(ratio))
        return int(token)

    def finish(self, num_steps: int) -> None:
        """Leave the default generator where plain leaves it after `num_steps` decoding steps.

        Should that fail, the generator is again where the call found it.
        """
        if self._saved is None:
            self._blocks.clear()
            return
        state = self._saved.begin
        try:
            self._go_to(num_steps)
            state = self._replay.generator.get_state()
        finally:
            self._saved.put_back(state)
            self._blocks.clear()

    def _go_to(self, step: int) -> None:
        self._replay.back_to(step)
        while self._replay.at < step:
            self._draw()

    def _draw(self) -> None:
        block = torch.empty(self._shape, dtype=torch.float32, device=self._device)
        self._blocks[self._replay.at] = block.exponential_(generator=self._replay.generator)
        self._replay.drew()
        while len(self._blocks) > self._max_blocks:
            del self._blocks[next(iter(self._blocks))]
