"""The best next tokens at every verified node, with probabilities.

On a device they are found for all nodes at once, from the verification's own pass over the logits
if there is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from lookahead_hf.kernels import RowScan, Wanted
    from lookahead_hf.runner.outputs import HostCopy, PendingCopy


class BestTokens:
    """Finds the k best logits of nodes: in one kernel for all, or on demand."""

    def __init__(self, logits: torch.Tensor, top_k: int, few: int | None = None) -> None:
        """Take the logits, [rows, width, vocab], of which the `top_k` best are searched later.

        `few` are enough where no accepted path ends.
        """
        self._top_k, self._few = top_k, few
        self._width = logits.shape[1]
        self._flat = logits.detach().flatten(0, 1)  # [rows * width, vocab]
        self._pending: PendingCopy | None = None
        self._held: np.ndarray | None = None
        self._bits: np.ndarray | None = None

    def prefetch(self, copy: HostCopy) -> None:
        """Start the search on the device and add its result to the copy to the host."""
        if self._on_device():
            from lookahead_hf.kernels import Wanted

            wanted = None
            if copy.walk is not None and copy.num_nodes is not None and self._few is not None:
                wanted = Wanted(copy.walk, copy.num_nodes, min(self._few, self._flat.shape[1]))
            self._pending = copy.add(_pack(self._flat, self._top_k, copy.scan, wanted))

    def _on_device(self) -> bool:
        from lookahead_hf.kernels import backend

        device = self._flat.device
        return device.type != "cpu" or backend(device) == "triton"

    def take(
        self, rows: np.ndarray, places: np.ndarray, counts: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the best tokens at places of rows, [nodes] each, and their probabilities.

        Both are [nodes, most of counts], best first, padded with -1. On a CPU only `counts`,
        [nodes], are searched, and the probabilities are approximate.
        """
        if counts is None:
            counts = np.full(len(rows), self._top_k)
        which, most = rows * self._width + places, int(counts.max(initial=0))
        if self._pending is None and self._flat.device.type == "cpu":
            from lookahead_hf.ngram_pool.logits_memory import top_rows

            if self._bits is None:
                self._bits = _bits(self._flat)
            return top_rows(self._bits, which, counts)
        if self._held is None:
            on_way = self._pending
            self._held = on_way.take() if on_way else _pack(self._flat, self._top_k).cpu().numpy()
        tokens, probs = self._held[:, which, :most]
        return _padded(tokens.astype(np.int32), most, -1), _padded(probs, most, 0.0)


def _pack(
    logits: torch.Tensor, top_k: int, scan: RowScan | None = None, wanted: Wanted | None = None
) -> torch.Tensor:
    """Return tokens and probabilities as one float32 tensor [2, rows, k], for a single copy.

    float32 holds whole numbers up to 2**24, more than any vocabulary has.
    """
    import torch

    from lookahead_hf.kernels import topk_rows

    values, ids, log_sum = topk_rows(logits, min(top_k, logits.shape[1]), scan, wanted)
    return torch.stack([ids.float(), (values - log_sum[:, None]).exp()])


def _bits(logits: torch.Tensor) -> np.ndarray:
    """Return the bit patterns of CPU logits: int16 of bfloat16, otherwise int32 of float32."""
    import torch

    is_half = logits.dtype == torch.bfloat16
    logits = logits if is_half else logits.float()
    bits: np.ndarray = logits.view(torch.int16 if is_half else torch.int32).numpy()
    return np.ascontiguousarray(bits)  # the compiled search knows one layout


def _padded(values: np.ndarray, top_k: int, fill: float) -> np.ndarray:
    """Widen `values`, [nodes, k], to `top_k` columns."""
    wide = np.full((len(values), top_k), fill, values.dtype)
    wide[:, : values.shape[1]] = values
    return wide
