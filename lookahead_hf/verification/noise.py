"""The seed guarantee: the noise that plain `generate` draws at a decoding step, at any time.

`torch.multinomial(probs, 1)` divides the probabilities by exponential noise and takes the argmax.
Plain draws one `[rows, vocab]` block of that noise per decoding step, finished rows included; a row
at its own step t that reads its row of block t picks plain's token, whatever the other rows do.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import torch

from lookahead_hf.runner.cuda.transfer import pinned
from lookahead_hf.verification import mersenne
from lookahead_hf.verification.rng import Parked, Replay

_FEW = 1024
"""With more tokens of any probability, a CPU looks first which of them can win at all."""


class Noise:
    """Noise blocks of one call in any order, drawn on a private copy of the default generator.

    `finish` puts the default generator where plain leaves it, unless somebody else has moved it.
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
        self._parked = Parked(self._device)
        self._replay = Replay(torch.Generator(self._device), self._parked.begin)
        self._open = True

    def block(self, step: int) -> torch.Tensor:
        """The noise that plain draws at decoding step `step`, [rows, vocab]; 0 follows the prefill.

        It is kept for a while: do not write to it.
        """
        if step not in self._blocks:
            self._go_to(step)
            self._draw()
        return self._blocks[step]

    def blocks(self, steps: np.ndarray, depths: int) -> torch.Tensor:
        """Each row's noise at its own step and the ones after it.

        Args:
            steps: Decoding step of every row, [rows].
            depths: How many steps of each.

        Returns:
            [rows, depths, vocab].
        """
        rows, vocab = self._shape
        wanted = (steps[:, None] + np.arange(depths)).reshape(-1)  # [rows * depths]
        order = np.argsort(wanted, kind="stable")
        places = pinned(np.stack([order, order // depths]), self._device)
        index = places.to(self._device, non_blocking=True)
        out = torch.empty(rows * depths, vocab, dtype=self._dtype, device=self._device)
        firsts = np.flatnonzero(np.diff(wanted[order], prepend=-1))
        for first, end in zip(firsts.tolist(), [*firsts[1:].tolist(), len(order)], strict=True):
            to, of = index[:, first:end]
            out.index_copy_(0, to, self.block(int(wanted[order[first]])).index_select(0, of))
        return out.view(rows, depths, vocab)

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

    def pick_each(self, probs: torch.Tensor, rows: list[int], steps: np.ndarray) -> list[int]:
        """The tokens that plain picks for some rows, each at its own step, in one copy to the host.

        Args:
            probs: Probabilities of each row's next token, [rows that are asked, vocab].
            rows: These rows.
            steps: As in `pick`, [rows that are asked].

        Raises:
            RuntimeError: What torch says about probabilities that are not finite.
        """
        noise = [self.block(step)[row] for row, step in zip(rows, steps.tolist(), strict=True)]
        best = (probs / torch.stack(noise)).max(-1)
        ratios, tokens = torch.stack([best.values.double(), best.indices.double()]).tolist()
        if not all(map(math.isfinite, ratios)):
            torch.multinomial(torch.tensor([float("nan")]), 1)  # raises for plain
        return [int(token) for token in tokens]

    def pick_rows(self, probs: torch.Tensor, step: int) -> torch.Tensor:
        """The tokens that plain picks for all rows at one step: [rows, vocab] -> [rows]."""
        return (probs / self.block(step)).argmax(-1)

    def finish(self, num_steps: int) -> None:
        """Leave the default generator where plain leaves it after `num_steps` decoding steps."""
        if self._open:
            self._go_to(num_steps)
            self._end(self._replay.generator.get_state())

    def close(self) -> None:
        """Put the default generator back where the call found it, if `finish` was not reached."""
        if self._open:
            self._end(self._parked.begin)

    def _end(self, state: torch.Tensor) -> None:
        self._parked.put_back(state)
        self._open = False
        self._blocks.clear()
        self._raw_blocks.clear()

    def _best(self, probs: torch.Tensor, row: int, step: int) -> tuple[int, float]:
        """The token with the greatest `probs / noise`, [vocab], and that ratio."""
        if self._twister is not None:
            raw, first = self._raw_block(step, self._twister), row * self._shape[1]
            weights = probs.numpy()
            tokens = _contenders(weights, raw, first)
            if len(tokens):
                ratios = weights[tokens] / raw.exponential(first + tokens)
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


def _contenders(weights: np.ndarray, raw: mersenne.RawBlock, first: int) -> np.ndarray:
    """Tokens that can have the greatest `weight / noise`; none where a weight is not a number.

    Args:
        weights: Probabilities of a row, [vocab].
        raw: The step's random numbers.
        first: The row's first element in them.
    """
    tokens = np.flatnonzero(weights != 0)
    if len(tokens) <= _FEW:
        return tokens
    with np.errstate(divide="ignore", invalid="ignore"):
        # -log(1 - u), the noise, is never below u.
        bound = weights / raw.uniform(slice(first, first + len(weights)))
    likely = bound.argmax(keepdims=True)
    reached = (weights[likely] / raw.exponential(first + likely))[0]
    return np.flatnonzero(bound >= reached * (1 - 1e-6))
