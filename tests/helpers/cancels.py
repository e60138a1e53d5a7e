"""A streamer that ends a call from within."""

from __future__ import annotations

import torch


class Cancelled(Exception):
    """What the streamer raises."""


class CancelsLate:
    """Raises after so many tokens."""

    def __init__(self, most: int) -> None:
        self.left = most

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise Cancelled

    def end(self) -> None:
        """Nothing to end."""
