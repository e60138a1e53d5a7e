"""The seed guarantee: the noise that plain `generate` draws at a decoding step, at any time.

`torch.multinomial(probs, 1)` divides the probabilities by exponential noise and takes the argmax.
Plain draws one `[rows, vocab]` block of that noise per decoding step, finished rows included; a row
at its own step t that reads its row of block t picks plain's token, whatever the other rows do.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from functools import lru_cache

import torch

_LOCK = threading.Lock()
"""Held while a default generator is read and moved."""

_CHECKPOINT = 64
"""Every so many steps a generator state is kept for good."""

_RECENT = 1024
"""Generator states kept besides; a CPU state takes 5 KB."""


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
        block_bytes = num_rows * vocab * torch.empty((), dtype=dtype).element_size()
        self._max_blocks = max(2, max_bytes // max(1, block_bytes))
        self._blocks: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._default = default_generator(self._device)
        self._private = torch.Generator(self._device)
        with _LOCK:
            begin = self._default.get_state()
            self._parked = _far_from(begin, self._device)
            self._default.set_state(self._parked)
        self._open = True
        self._private.set_state(begin)
        self._at = 0  # the step whose block the private generator would draw next
        self._front = 0  # the highest step with a known state
        self._checkpoints = [begin]
        self._recent: OrderedDict[int, torch.Tensor] = OrderedDict()

    def block(self, step: int) -> torch.Tensor:
        """The noise that plain draws at decoding step `step`, [rows, vocab]; 0 follows the prefill.

        It is kept for a while: do not write to it.
        """
        kept = self._blocks.get(step)
        if kept is None:
            self._go_to(step)
            kept = self._draw()
        else:
            self._blocks.move_to_end(step)
        return kept

    def pick(self, probs: torch.Tensor, row: int, step: int) -> int:
        """The token that plain picks for a row at its decoding step.

        Args:
            probs: Probabilities of the row's next token, [1, vocab].
            row: The row.
            step: Tokens that the row has emitted before this one.

        Raises:
            RuntimeError: What torch says about probabilities that are not finite.
        """
        ratio = probs[0] / self.block(step)[row]
        token = int(ratio.argmax())
        if not ratio[token].isfinite():
            torch.multinomial(probs, 1, generator=torch.Generator(self._device))  # raises for plain
        return token

    def pick_rows(self, probs: torch.Tensor, step: int) -> torch.Tensor:
        """The tokens that plain picks for all rows at one step: [rows, vocab] -> [rows]."""
        return (probs / self.block(step)).argmax(-1)

    def finish(self, num_steps: int) -> None:
        """Leave the default generator where plain leaves it after `num_steps` decoding steps."""
        if not self._open:
            return
        self._go_to(num_steps)
        self._unpark(self._private.get_state())

    def close(self) -> None:
        """Put the default generator back where the call found it, if `finish` was not reached."""
        if self._open:
            self._unpark(self._checkpoints[0])

    def _unpark(self, state: torch.Tensor) -> None:
        with _LOCK:
            if torch.equal(self._default.get_state(), self._parked):
                self._default.set_state(state)
        self._open = False
        self._blocks.clear()

    def _draw(self) -> torch.Tensor:
        block = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        block.exponential_(generator=self._private)
        self._blocks[self._at] = block
        if len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
        self._at += 1
        self._keep_state()
        return block

    def _keep_state(self) -> None:
        state = self._private.get_state()
        if self._at == len(self._checkpoints) * _CHECKPOINT:
            self._checkpoints.append(state)
        self._recent[self._at] = state
        self._recent.move_to_end(self._at)
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)
        self._front = max(self._front, self._at)

    def _go_to(self, step: int) -> None:
        """Bring the private generator to the state in which plain enters `step`."""
        known = min(step, self._front)
        while known != self._at and known not in self._recent and known % _CHECKPOINT:
            known -= 1
        if known != self._at:
            state = self._recent.get(known)
            self._private.set_state(
                self._checkpoints[known // _CHECKPOINT] if state is None else state
            )
            self._at = known
        while self._at < step:
            self._draw()

    def __enter__(self) -> Noise:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NoiseInOrder:
    """The same for one row: its tokens are picked in plain's order, so plain's own draw will do.

    Whatever else draws from the default generator in mid-call (a processor, a criterion) then finds
    it where plain would have left it.
    """

    def pick(self, probs: torch.Tensor, row: int, step: int) -> int:
        """The token that plain picks: see `Noise.pick`; steps must be asked for in order."""
        return int(torch.multinomial(probs, 1))

    def finish(self, num_steps: int) -> None:
        """Nothing to do: the default generator stands where plain leaves it."""

    def close(self) -> None:
        """Nothing to do."""

    def __enter__(self) -> NoiseInOrder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def plain_noise(num_rows: int, vocab: int, device: torch.device | str) -> Noise | NoiseInOrder:
    """The noise of a call that walks its rows; open it with `with`."""
    return NoiseInOrder() if num_rows == 1 else Noise(num_rows, vocab, device)


def _far_from(state: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A generator state that follows from `state` but lies on another stretch of random numbers."""
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little")).get_state()
