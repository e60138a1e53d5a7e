"""How a model is split over processes: not at all, each matrix in parts, or weights in shards."""

from __future__ import annotations

from typing import Any

from torch import distributed, nn

from lookahead_hf import compat
from lookahead_hf.fallback import FallbackReason, Unserved


def is_one_of_several() -> bool:
    """Return whether this process belongs to a group of several."""
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1


def check(model: Any) -> None:
    """Raise Unserved where a model is split over processes in a way that is not served."""
    if (stages := compat.num_pipeline(model)) > 1:
        raise Unserved(FallbackReason.TENSOR_PARALLEL, f"a pipeline of {stages} processes")
    processes = compat.num_tensor_parallel(model)
    if tensor_group(model) is None and processes > 1:
        raise Unserved(FallbackReason.TENSOR_PARALLEL, f"{processes} processes, no common mesh")


def is_spread(model: nn.Module) -> bool:
    """Return whether a forward of the model needs other processes."""
    return is_one_of_several() and (bool(_meshes(model)) or is_sharded(model))


def is_sharded(model: nn.Module) -> bool:
    """Return whether processes with rows of their own share the weights, by FSDP or ZeRO-3."""
    if not is_one_of_several():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = (FSDPModule, FullyShardedDataParallel)
    of_deepspeed = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    return of_deepspeed or any(isinstance(module, kinds) for module in model.modules())


def tensor_group(model: nn.Module) -> distributed.ProcessGroup | None:
    """Return the processes that hold parts of each matrix and run all rows together, if any.

    Unserved if the weights are sharded too, or the processes differ between the matrices.
    """
    meshes = _meshes(model)
    if not meshes or (len(meshes) == 1 and is_sharded(model)):
        return None
    if is_sharded(model):
        raise Unserved(FallbackReason.TENSOR_PARALLEL, "of a model whose weights are sharded too")
    if len(meshes) > 1 or meshes[0].ndim > 1:
        raise Unserved(FallbackReason.TENSOR_PARALLEL, "over more than one dimension of processes")
    return meshes[0].get_group()


def _meshes(model: nn.Module) -> list[Any]:
    """Return the meshes of several processes that parameters are split over."""
    if not is_one_of_several():
        return []
    from torch.distributed.tensor import DTensor

    found: list[Any] = []
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            if mesh.size() > 1 and mesh not in found:
                found.append(mesh)
    return found
