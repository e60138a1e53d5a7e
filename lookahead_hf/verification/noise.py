"""The seed guarantee: the noise that plain `generate` draws at a decoding step, at any time.

`torch.multinomial(probs, 1)` divides the probabilities by exponential noise and takes the argmax.
Plain draws one `[rows, vocab]` block of that noise per decoding step, finished rows included; a row
at its own step t that reads its row of block t picks plain's token, whatever the other rows do.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from functools import lru_cache

import numpy as np
import torch

from lookahead_hf.verification import mersenne

_LOCK = threading.Lock()
"""Held while a default generator is read and moved."""

_CHECKPOINT = 64
"""Every so many steps a generator state is kept for good."""

_RECENT = 1024
"""Generator states kept besides; a CPU state takes 5 KB."""

_FEW = 4096
"""Up to so many tokens with any probability, a CPU computes the noise of these alone."""


def default_generator(device: torch.device | str) -> torch.Generator:
    """The generator that `torch.multinomial` draws from on `device`.

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
    """Whether `argmax(probs / noise)` is `torch.multinomial` on this device, generator state too.

    Tried once per device on a generator of its own, since it rests on how torch is written.
    """
    try:
        default_generator(device)
        drawn, kept = (torch.Generator(device).manual_seed(7) for _ in range(2))
        probs = torch.rand(3, 4099, generator=torch.Generator().manual_seed(7)).to(device)
        tokens = torch.multinomial(probs, 1, generator=drawn).squeeze(1)
        noise = torch.empty_like(probs).exponential_(generator=kept)
        same_state = torch.equal(drawn.get_state(), kept.get_state())
        return same_state and torch.equal((probs / noise).argmax(-1), tokens)
    except (RuntimeError, ValueError, NotImplementedError):
        return False


class _Replay:
    """A generator that finds back to the state before any of its draws.

    The newest states are kept, and for good every sixty-fourth.
    """

    def __init__(self, generator: torch.Generator, begin: torch.Tensor) -> None:
        self.generator = generator
        self.generator.set_state(begin)
        self.at = 0  # draws made up to where the generator stands
        self._front = 0
        self._checkpoints = [begin]
        self._recent: OrderedDict[int, torch.Tensor] = OrderedDict()

    @property
    def begin(self) -> torch.Tensor:
        """The state before the first draw."""
        return self._checkpoints[0]

    def back_to(self, draw: int) -> None:
        """Go to a known state at most sixty-three draws before `draw`, or else the furthest."""
        known = min(draw, self._front)
        while known != self.at and known not in self._recent and known % _CHECKPOINT:
            known -= 1
        if known != self.at:
            state = self._recent.get(known)
            self.generator.set_state(
                self._checkpoints[known // _CHECKPOINT] if state is None else state
            )
            self.at = known

    def drew(self) -> None:
        """One more draw was made."""
        self.at += 1
        self._front = max(self._front, self.at)
        state = self.generator.get_state()
        if self.at == len(self._checkpoints) * _CHECKPOINT:
            self._checkpoints.append(state)
        self._recent[self.at] = state
        self._recent.move_to_end(self.at)
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)


class Noise:
    """Noise blocks of one call in any order, drawn on a private copy of the default generator.

    While it is open the default generator stands far away from the states that plain would take it
    through, so that nothing that draws meanwhile (another call, another thread) repeats our noise.
    `finish` puts it where plain leaves it, unless somebody else has moved it since.
    """

    def __init__(
        self,
        num_rows: int,
        vocab: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        *,
        max_bytes: int = 64 << 20,
    ) -> None:
        """`max_bytes`: room for the newest blocks; at least two are kept."""
        self._shape = (num_rows, vocab)
        self._device, self._dtype = torch.device(device), dtype
        sparse = self._device.type == "cpu" and dtype is torch.float32 and mersenne.is_exact()
        self._twister = mersenne.Twister() if sparse else None
        self._max_blocks = max(2, max_bytes // (8 * num_rows * vocab))
        self._blocks: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._raw_blocks: OrderedDict[int, mersenne.RawBlock] = OrderedDict()
        self._default = default_generator(self._device)
        with _LOCK:
            begin = self._default.get_state()
            self._parked = _far_from(begin, self._device)
            self._default.set_state(self._parked)
        self._replay = _Replay(torch.Generator(self._device), begin)
        self._open = True

    def block(self, step: int) -> torch.Tensor:
        """The noise that plain draws at decoding step `step`, [rows, vocab]; 0 follows the prefill.

        It is kept for a while: do not write to it.
        """
        if step not in self._blocks:
            self._go_to(step)
            self._draw()
        return self._blocks[step]

    def pick(self, probs: torch.Tensor, row: int, step: int) -> int:
        """The token that plain picks for a row at its decoding step.

        Args:
            probs: Probabilities of the row's next token, [1, vocab].
            row: The row.
            step: Tokens that the row has emitted before this one.

        Raises:
            RuntimeError: What torch says about probabilities that are not finite.
        """
        token, ratio = self._best(probs[0], row, step)
        if not math.isfinite(ratio):
            torch.multinomial(probs, 1, generator=torch.Generator(self._device))  # raises for plain
        return token

    def pick_rows(self, probs: torch.Tensor, step: int) -> torch.Tensor:
        """The tokens that plain picks for all rows at one step: [rows, vocab] -> [rows]."""
        return (probs / self.block(step)).argmax(-1)

    def finish(self, num_steps: int) -> None:
        """Leave the default generator where plain leaves it after `num_steps` decoding steps."""
        if self._open:
            self._go_to(num_steps)
            self._unpark(self._replay.generator.get_state())

    def close(self) -> None:
        """Put the default generator back where the call found it, if `finish` was not reached."""
        if self._open:
            self._unpark(self._replay.begin)

    def _unpark(self, state: torch.Tensor) -> None:
        with _LOCK:
            if torch.equal(self._default.get_state(), self._parked):
                self._default.set_state(state)
        self._open = False
        self._blocks.clear()
        self._raw_blocks.clear()

    def _best(self, probs: torch.Tensor, row: int, step: int) -> tuple[int, float]:
        """The token with the greatest `probs / noise`, [vocab], and that ratio."""
        if self._twister is not None:
            weights = probs.numpy()
            tokens = np.flatnonzero(weights != 0)
            if 0 < len(tokens) <= _FEW:
                raw = self._raw_block(step, self._twister)
                ratios = weights[tokens] / raw.exponential(row * self._shape[1] + tokens)
                best = int(ratios.argmax())
                return int(tokens[best]), float(ratios[best])
        ratio = probs / self.block(step)[row]
        if ratio.device.type == "cpu":
            ratios = ratio.numpy()
            best = int(ratios.argmax())  # 4 us for 49,152, torch takes 42
            return best, float(ratios[best])
        token = ratio.argmax()
        answer = torch.stack([token.float(), ratio[token].float()]).tolist()  # one copy to the host
        return int(answer[0]), answer[1]

    def _raw_block(self, step: int, twister: mersenne.Twister) -> mersenne.RawBlock:
        if step not in self._raw_blocks:
            self._go_to(step)
            self._draw_raw(twister)
        return self._raw_blocks[step]

    def _go_to(self, step: int) -> None:
        """Bring the private generator to the state in which plain enters `step`."""
        self._replay.back_to(step)
        while self._replay.at < step:
            if self._twister is None:
                self._draw()
            else:
                self._draw_raw(self._twister)

    def _draw(self) -> None:
        block = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        self._blocks[self._replay.at] = block.exponential_(generator=self._replay.generator)
        self._drew()

    def _draw_raw(self, twister: mersenne.Twister) -> None:
        raw = twister.draw(self._replay.generator, self._shape[0] * self._shape[1])
        self._raw_blocks[self._replay.at] = raw
        self._drew()

    def _drew(self) -> None:
        self._replay.drew()
        while len(self._blocks) + len(self._raw_blocks) > self._max_blocks:
            older = self._blocks if len(self._blocks) > len(self._raw_blocks) else self._raw_blocks
            older.popitem(last=False)

    def __enter__(self) -> Noise:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NoiseInOrder:
    """The same for calls whose tokens are picked in plain's order: plain's own draw will do.

    Whatever else draws from the default generator in mid-call (a processor or criterion of the
    user) then finds it where plain would have left it.
    """

    def pick(self, probs: torch.Tensor, row: int, step: int) -> int:
        """The token of a call's only row: see `Noise.pick`; steps must be asked for in order."""
        return int(torch.multinomial(probs, 1))

    def pick_rows(self, probs: torch.Tensor, step: int) -> torch.Tensor:
        """The tokens of all rows: [rows, vocab] -> [rows]; steps must be asked for in order."""
        return torch.multinomial(probs, 1).squeeze(1)

    def finish(self, num_steps: int) -> None:
        """Nothing to do: the default generator stands where plain leaves it."""

    def close(self) -> None:
        """Nothing to do."""

    def __enter__(self) -> NoiseInOrder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _far_from(state: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A generator state that follows from `state` but lies on another stretch of random numbers."""
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little")).get_state()
