"""What a repeated step has frozen of a model: compared between calls, and in every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._device import DeviceContext

from lookahead_hf import compat
from lookahead_hf.runner.standing import Standing, global_hooks, has_hooks, hooks_of
from lookahead_hf.runner.values import Same


def fingerprint(model: Any) -> tuple[Any, ...]:
    """Where a model's weights are, whose forwards it runs, and in which mode.

    What modules and configurations hold beside that is in `standing.settings`.
    """
    tensors = [*model.parameters(), *model.buffers()]
    modules = [
        (module.training, Same(type(module).forward), Same(vars(module).get("forward")))
        for module in model.modules()
    ]
    configs = [
        (compat.attention_name(config), getattr(config, "_experts_implementation", None))
        for config in compat.attention_configs(model)
    ]
    device = tensors[0].device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return (
        (autocast, torch.get_float32_matmul_precision()),
        tuple(address for tensor in tensors for address in addresses(tensor)),
        tuple(modules),
        tuple(configs),
    )


def addresses(tensor: torch.Tensor) -> list[tuple[Any, ...]]:
    """Where a tensor's numbers are, those of the tensors in it where it is a wrapper of some."""
    if hasattr(tensor, "__tensor_flatten__"):  # quantised weights, for instance
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return [address for each in inner for address in addresses(each)]
    return [(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())]


def passed_over(model: nn.Module) -> str | None:
    """What a captured step of a model would pass over, in words; None if there is nothing."""
    if _is_watched():
        return "calls of torch are being watched"
    if global_hooks():
        return "modules have hooks"
    for module in model.modules():
        if has_hooks(module):
            return "modules have hooks"
        if _is_replaced(module):
            return "a forward was replaced"
    return None


def _is_watched() -> bool:
    """Whether a mode sees calls of torch, other than the one of `torch.set_default_device`."""
    modes = torch.overrides._get_current_function_mode_stack()
    is_known = all(type(mode) is DeviceContext for mode in modes)
    return not is_known or torch._C._len_torch_dispatch_stack() > 0


def _is_replaced(module: nn.Module) -> bool:
    """Whether a module object has a forward of its own that is not its class's, compiled."""
    own = vars(module).get("forward")
    if own is None:
        return False
    inner = getattr(own, "_torchdynamo_orig_callable", None)
    if inner is None:
        return True
    from torch._dynamo import OptimizedModule  # loaded already, where there is such a forward

    owner, function = getattr(inner, "__self__", None), getattr(inner, "__func__", None)
    is_own = owner is module and function is type(module).forward
    return not (is_own or isinstance(module, OptimizedModule))


class Frozen:
    """A model as it was when a call went over to captured steps.

    A streamer or another thread may switch an adapter, hook a layer or exchange a weight in the
    middle of a call, and plain `generate` does the next step with that.
    """

    def __init__(self, model: nn.Module) -> None:
        """Remember what the model is now; its weights stay in memory with this."""
        self._model, self._standing = model, Standing(model)
        self._around = self._hooks_around()
        tensors = (*model.parameters(), *model.buffers())
        plain = [each for each in tensors if not hasattr(each, "__tensor_flatten__")]
        self._data = [(each, each.data_ptr()) for each in plain]
        self._storages = [each.untyped_storage() for each in plain]

    def _hooks_around(self) -> list[Any]:
        return global_hooks() + hooks_of(self._model)

    def is_current(self) -> bool:
        """Whether the model still is just that: the same objects, the same tensors in them."""
        return (
            self._hooks_around() == self._around
            and self._standing.is_current()
            and all(tensor.data_ptr() == address for tensor, address in self._data)
        )
