"""The best next tokens at every verified node, with probabilities, from the target's logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from lookahead_hf.target.host_copy import HostCopy, Ticket


class BestTokens:
    """Finds the k best logits of nodes: on a device at once for all, on the CPU when asked."""

    def __init__(self, logits: torch.Tensor, top_k: int) -> None:
        """Start to look.

        Args:
            logits: Logits of all rows, [rows, width, vocab], on any device.
            top_k: Tokens to find per node.
        """
        self._top_k = top_k
        self._width = logits.shape[1]
        self._flat = logits.detach().flatten(0, 1)  # [rows * width, vocab]
        self._packed: torch.Tensor | None = None
        self._ticket: Ticket | None = None
        if logits.device.type != "cpu":
            self._packed = _pack(self._flat, top_k)

    def bring(self, copy: HostCopy) -> None:
        """Come to the host together with other things."""
        if self._packed is not None:
            self._ticket = copy.add(self._packed)

    def take(self, rows: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Best tokens of chosen nodes.

        Args:
            rows: Row of each node, [nodes] int64.
            places: Its place in the row's logits, [nodes] int64.

        Returns:
            tokens: Best first, -1: none, [nodes, top_k] int32.
            probs: Their probabilities, [nodes, top_k] float32; on the CPU approximate.
        """
        which = rows * self._width + places
        if self._packed is None:
            from lookahead_hf.ngram_pool.logits_memory import top_rows

            return top_rows(_bits(self._flat), which, self._top_k)
        held = self._packed.cpu().numpy() if self._ticket is None else self._ticket.take()
        tokens, probs = held[:, which]
        return _padded(tokens.astype(np.int32), self._top_k, -1), _padded(probs, self._top_k, 0.0)


def _pack(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Tokens and probabilities as one float32 tensor [2, rows, k], so that one copy fetches both.

    float32 holds whole numbers up to 2**24, more than any vocabulary.
    """
    import torch

    from lookahead_hf.kernels import topk_rows

    values, ids = topk_rows(logits, min(top_k, logits.shape[1]))
    log_sum = logits.float().logsumexp(1, keepdim=True)
    return torch.stack([ids.float(), (values.float() - log_sum).exp()])


def _bits(logits: torch.Tensor) -> np.ndarray:
    """Bit patterns of CPU logits: int16 of bfloat16, int32 of everything else as float32."""
    import torch

    logits = logits.contiguous()  # the compiled search knows one layout
    if logits.dtype == torch.bfloat16:
        return logits.view(torch.int16).numpy()
    return logits.float().view(torch.int32).numpy()


def _padded(values: np.ndarray, top_k: int, fill: float) -> np.ndarray:
    """`values` [nodes, k] widened to `top_k` columns."""
    wide = np.full((len(values), top_k), fill, values.dtype)
    wide[:, : values.shape[1]] = values
    return wide
