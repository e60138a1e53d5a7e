"""Private names of torch."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_map_only as tree_map_only

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)

HOLDERS = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
"""Attributes of a module that are dicts of its parts and hooks."""


def global_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks before and after the forwards of all modules."""
    hooks = nn.modules.module
    return hooks._global_forward_pre_hooks, hooks._global_forward_hooks


def watches_functions() -> bool:
    """Return whether a mode sees calls of functions, except that of `torch.set_default_device`.

    The latter only chooses the device of new tensors, which our forwards name.
    """
    modes = torch.overrides._get_current_function_mode_stack()
    return any(type(mode) is not DeviceContext for mode in modes)


def watches_operations() -> bool:
    """Return whether a mode sees the operations that functions are made of."""
    return bool(torch._C._len_torch_dispatch_stack())


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module itself."""
    own = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in own if tensor is not None]


def compiled_from(function: Any) -> Any:
    """Return the function that `torch.compile` was given for this one, None for any other.

    A function around compiled code that was made by `functools.wraps` has the same attribute.
    """
    made_in = getattr(function, "__globals__", {}).get("__name__", "")
    is_dynamos = made_in.startswith("torch._dynamo")
    return getattr(function, "_torchdynamo_orig_callable", None) if is_dynamos else None


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return whether a module is what `torch.compile` returned for another one."""
    dynamo: Any = sys.modules.get("torch._dynamo")  # slow to load, but loaded where there is one
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def wrapper_tensor(
    kind: type[_Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> _Tensor:
    """Return a tensor of a subclass that has a shape and no memory."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def num_changes(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written in place; inference tensors do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def forget_cublas_workspaces() -> None:
    """Let cuBLAS take new workspaces."""
    torch._C._cuda_clearCublasWorkspaces()


def end_allocations_to_pool(device: int, pool: Any) -> None:
    """Take no more memory for a CUDA device from a graph's pool."""
    torch._C._cuda_endAllocateToPool(device, pool)


CALL = "_compiled_call_impl"
"""The attribute that torch calls in place of a module's hooks and forward. Copies and pickles of a
module leave it out, so that a model can be copied and saved in the middle of a step."""


def own_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, whatever replaces its call."""
    return module._call_impl(*args, **kwargs)


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """Return the dictionary of a module's own parameters."""
    return module._parameters


def children_of(module: nn.Module) -> dict[str, Any]:
    """Return the dictionary of a module's own modules."""
    return module._modules


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """Return the dictionaries of a module's hooks after and before its forward."""
    return [module._forward_hooks, module._forward_pre_hooks]


def multiplies_slowly(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies matrices of a dtype in a loop of its own on this processor.

    For types that oneDNN has no code for, it does; the loop takes a multiple of the time.
    """
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    is_supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return is_supported is not None and not is_supported()


def is_autocast() -> bool:
    """Return whether autocast is on for any device."""
    return torch._C._is_any_autocast_enabled()
