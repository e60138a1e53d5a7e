"""A mask that is made only if something reads it: our kernel does without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lookahead_hf import compat

_OF_SHAPE = frozenset(
    {
        torch.Tensor.dim,
        torch.Tensor.size,
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("device", "dtype", "is_cuda", "ndim", "requires_grad", "shape")
        ),
    }
)
"""What can be asked of a mask that was not made."""


class UnreadMask(torch.Tensor):
    """Stands in for a mask, which every function of torch that gets it reads in its place.

    Attributes:
        made: The mask, None as long as nothing has read it.
    """

    _make: Callable[[], torch.Tensor]
    made: torch.Tensor | None

    @staticmethod
    def of(
        make: Callable[[], torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> UnreadMask:
        """Return a stand-in for what `make` returns, a tensor of this shape."""
        mask = compat.wrapper_tensor(UnreadMask, shape, dtype, device)
        mask._make, mask.made = make, None
        return mask

    def _read(self) -> torch.Tensor:
        if self.made is None:
            self.made = self._make()
        return self.made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OF_SHAPE:
            return super().__torch_function__(func, types, args, kwargs or {})
        args, kwargs = compat.map_only(UnreadMask, UnreadMask._read, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = compat.map_only(UnreadMask, UnreadMask._read, (args, kwargs or {}))
        return func(*args, **kwargs)


def made(mask: torch.Tensor) -> torch.Tensor | None:
    """Return the mask that a layer reads: None for a stand-in that nothing has read."""
    return mask.made if isinstance(mask, UnreadMask) else mask
