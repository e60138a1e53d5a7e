"""A mask that is built only if something reads it; our kernel does not."""

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
"""Properties that are read without building the mask."""


class LazyMask(torch.Tensor):
    """A mask that is built when a function of torch first reads it.

    Attributes:
        made: The mask, None before that.
    """

    _make: Callable[[], torch.Tensor]
    made: torch.Tensor | None

    @staticmethod
    def of(
        make: Callable[[], torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> LazyMask:
        """Return a mask of this shape that `make` builds."""
        mask = compat.wrapper_tensor(LazyMask, shape, dtype, device)
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
        args, kwargs = compat.map_only(LazyMask, LazyMask._read, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = compat.map_only(LazyMask, LazyMask._read, (args, kwargs or {}))
        return func(*args, **kwargs)


def made(mask: torch.Tensor) -> torch.Tensor | None:
    """Return a mask as layers read it, None for a lazy one that nothing has read."""
    return mask.made if isinstance(mask, LazyMask) else mask
