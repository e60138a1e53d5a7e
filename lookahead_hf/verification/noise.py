"""The noise that plain `generate` draws at a decoding step, in any order: same seed, same text.

`torch.multinomial(probs, 1)` divides the probabilities by exponential noise and takes the argmax.
Plain draws one `[rows, vocab]` block of that noise per decoding step, finished rows included. A row
at its own step t that reads its row of block t picks plain's token, whatever the other rows do.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from lookahead_hf.runner.outputs import pinned
from lookahead_hf.verification.rng import Replay, SavedGenerator, refuse_unless


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

        Args:
            num_rows: Rows of the batch.
            vocab: Token ids of the target.
            device: Where the noise is drawn.
            max_bytes: Memory for the newest blocks; at least two are kept.
            seed: A seed, which leaves the default generator alone; None to begin in its state.
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
        """Return the noise that plain draws at a decoding step, [rows, vocab] float32.

        The block is kept for a while: do not write to it.

        Args:
            step: The decoding step; 0 is the one that follows the prefill.
        """
        if step not in self._blocks:
            self._go_to(step)
            self._draw()
        return self._blocks[step]

    def blocks(self, steps: np.ndarray, depths: int) -> torch.Tensor:
        """Return each row's noise at its own step and at the steps after it.

        Args:
            steps: Decoding step of every row, [rows].
            depths: Number of consecutive steps per row.

        Returns:
            [rows, depths, vocab].
        """
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
        """Return the token that plain picks for a row, with one copy to the host.

        Args:
            probs: Probabilities of the row's next token, [vocab].
            row: The row.
            step: Tokens that it emitted before this one.

        Raises:
            RuntimeError: The probabilities are not finite; the message is torch's own.
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
        """Bring the private generator to the state in which plain begins `step`."""
        self._replay.back_to(step)
        while self._replay.at < step:
            self._draw()

    def _draw(self) -> None:
        block = torch.empty(self._shape, dtype=torch.float32, device=self._device)
        self._blocks[self._replay.at] = block.exponential_(generator=self._replay.generator)
        self._replay.drew()
        while len(self._blocks) > self._max_blocks:
            del self._blocks[next(iter(self._blocks))]
