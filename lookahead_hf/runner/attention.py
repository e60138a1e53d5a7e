"""Attends in our forwards: by our kernel, or by torch with grouped query heads as rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from lookahead_hf import kernels
from lookahead_hf.block.block import Block, HeldSlots, kernel_serves, read_mask
from lookahead_hf.block.packed import PackedBlock
from lookahead_hf.kernels.data import MAX_HEAD_DIM
from lookahead_hf.model import compat
from lookahead_hf.model.facts import facts_of
from lookahead_hf.runner.forward import ForwardContext, current

SERVED = ("eager", "sdpa")
"""Implementations that accept an additive mask. Flash attention does not, so draft steps use one of
these or our kernel instead."""

_PREFIX = "lookahead:"  # Begins the names of our attention; the model's own follows


class _Name(str):
    """The name of our attention; pickled or copied, it is that of the model's own.

    It equals both names, because models compare theirs (gemma4 with "sdpa"), but its place in dicts
    is that of ours.
    """

    def __hash__(self) -> int:  # in Python, which torch.compile can trace
        return hash(str(self))

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or str.__eq__(self.removeprefix(_PREFIX), other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.removeprefix(_PREFIX),)


def configs_of(model: nn.Module) -> list[Any]:
    """Return the configurations whose attention ours may replace."""
    return compat.registry_configs(model, facts_of(model).attention_configs)


def install(model: nn.Module, configs: Sequence[Any]) -> None:
    """Replace the model's attention by ours, by the names that its configurations hold.

    In forwards that are not ours, such as those of other threads, it is the model's own.
    """
    replaced = _replaced(model)
    for config in configs:
        name = compat.attention_name(config)
        if name in replaced and not isinstance(name, _Name):
            compat.set_attention_name(config, _registered(name))


def remove(configs: Sequence[Any]) -> None:
    """Restore the names of the model's own attention."""
    for config in configs:
        if isinstance(compat.attention_name(config), _Name):
            compat.set_attention_name(config, own_name(config))


def _replaced(model: nn.Module) -> tuple[str, ...]:
    """Return the implementations that ours replace: sdpa, and the text's flash attention.

    Eager attention is each modelling file's own. It is replaced only where flash attention could
    stand for it (soft-capped scores and sinks, which sdpa lacks) and where our kernel may attend.
    """
    own = own_name(compat.text_config(model))
    if own and compat.is_flash(compat.attention_function(own)):
        return ("sdpa", own)
    if not any(kernel_serves(device, 1) for device in facts_of(model).devices):
        return ("sdpa",)
    return SERVED if compat.has_only_flash_beside_eager(model) else ("sdpa",)


def is_ours_everywhere(model: nn.Module) -> bool:
    """Return whether all attention of the model, in prompts and in steps, may be ours."""
    names = {own_name(config) for config in facts_of(model).attention_configs}
    return names <= set(SERVED) and all(replaces(model, str(name)) for name in names)


def replaces(model: nn.Module, name: str) -> bool:
    """Return whether `patched` replaces all attention of this name by ours."""
    laid = set(map(id, configs_of(model)))
    of_name = [each for each in facts_of(model).attention_configs if own_name(each) == name]
    return name in _replaced(model) and all(id(each) in laid for each in of_name)


def own_name(config: Any) -> str | None:
    """Return the name of the model's own attention, also while ours replaces it."""
    name = compat.attention_name(config)
    return None if name is None else name.removeprefix(_PREFIX)


@cache
def _name(name: str) -> str:
    """Return one object per name: a dict finds it without comparing it."""
    return _Name(_PREFIX + name)


def _registered(name: str) -> str:
    ours = _name(name)
    if compat.attention_function(ours) is None:
        compat.register_attention(ours, _ours(name), like=name)
    return ours


def _ours(name: str) -> Callable[..., Any]:
    """Return our attention in our forwards, and the one registered by that name everywhere else."""

    def attention(
        module: nn.Module,
        query: torch.Tensor,  # [rows, heads, width, dim]
        key: torch.Tensor,  # [rows, kv_heads, slots, dim]
        value: torch.Tensor,  # [rows, kv_heads, slots, v_dim]
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        context = current()
        kwargs |= {"dropout": dropout, "scaling": scaling}
        if context is None or not isinstance(context.block, PackedBlock):
            return _attend(context, name, module, kwargs, query, key, value, attention_mask)
        attend = partial(_attend, context, name, module, kwargs)
        return context.block.attend(attention_mask, query, key, value, attend), None

    return attention


def _attend(
    context: ForwardContext | None,
    name: str,
    module: nn.Module,
    kwargs: dict[str, Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as the function of this name does, in our way where we have one."""
    function, is_stock = registered(context, name, module)
    # Depending on its version, transformers' sdpa refuses or ignores soft caps and sinks.
    has_more = kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None
    if compat.is_flash(function):
        if context is None or mask is None or mask.dim() == 2:
            named = compat.under_own_name(module, name)
            return function(named, query, key, value, mask, **kwargs)
        # It takes no mask of ours. Its replacement has all that the layer asks for.
        function = None if has_more else compat.SDPA
    if context is not None and is_stock and kwargs.get("position_bias") is None:
        block = context.block
        if isinstance(block, Block) and block.for_kernel and not (function and has_more):
            out = _by_kernel(block, mask, query, key, value, kwargs)
            if out is not None:
                return out, None
        mask = read_mask(mask)
        if function is not None and _folds(query, key, mask, kwargs):
            groups = query.shape[1] // key.shape[1]
            mask = None if mask is None else _folded(context, mask, groups)
            out = fold(query, key, value, mask, groups, kwargs["scaling"])
            # A packed block copies it into another order anyway.
            return (out if isinstance(block, PackedBlock) else out.contiguous()), None
    original = function or compat.eager_attention(module)
    is_replaced = context is not None and function is not None and not is_stock
    if is_replaced and mask is not None and mask.dtype != torch.bool:
        mask = mask == 0  # as transformers gives it to sdpa
    return original(module, query, key, value, mask, **kwargs)


def registered(context: ForwardContext | None, name: str, module: nn.Module) -> tuple[Any, bool]:
    """Return a module's attention function, and whether it is transformers' and torch's own.

    The function is None if none is registered by the name: then the module's file has its own.
    """
    found: tuple[Any, bool] | None = None if context is None else context.made.get(name)
    if found is None:
        function = compat.attention_function(name)
        found = function, compat.is_stock_attention(function, module)
        if context is not None and function is not None:
            context.made[name] = found
    return found


def _folded(context: ForwardContext, mask: torch.Tensor, groups: int) -> torch.Tensor:
    """Return a mask whose rows are repeated for each head of a group, made once per forward."""
    known = context.made.get((id(mask), groups))
    if known is None:
        known = mask, mask.repeat(1, 1, groups, 1)  # the mask itself keeps its id taken
        context.made[id(mask), groups] = known
    return known[1]


def _by_kernel(
    block: Block,
    mask: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """Attend by the kernel; None if it cannot or is slower. It returns no attention weights."""
    kind = None if mask is None else block.kind_of(mask)
    if kind is None or block.held[kind].kind.chunk is not None:
        return None
    if not kernel_is_faster(query, key, value):
        return None
    more = kwargs["scaling"], kwargs.get("softcap"), kwargs.get("s_aux")
    return attend_by_kernel(block, block.held[kind], query, key, value, *more)


def _folds(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> bool:
    """Return whether the query heads of a group can be folded, and are faster then.

    Single tokens that see everything gain in half precision only: in bfloat16 on a CPU they take
    121 instead of 623 us at context 1,100, and mostly get the same bits.
    """
    if query.shape[1] == key.shape[1] or kwargs.get("softcap"):
        return False
    if mask is not None and mask.shape[1] > 1:  # each head has its own
        return False
    return mask is not None or (query.shape[2] == 1 and query.dtype != torch.float32)


def fold(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,  # [rows, 1, groups * width, slots]
    groups: int,
    scaling: float | None,
) -> torch.Tensor:
    """Attend with `[rows, heads, width, dim]` queries; return `[rows, width, heads, v_dim]`.

    SDPA with a mask copies K and V for every query head. As rows of their group the query heads
    read them once (at context 1,500 and one row 108 instead of 693 us on a CPU).
    """
    rows, heads, width, dim = query.shape
    out = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, heads // groups, groups * width, dim),
        key,
        value,
        attn_mask=mask,
        scale=scaling,
    )
    return out.reshape(rows, heads, width, -1).transpose(1, 2)


_LEAST_SLOTS = 512  # Below this many slots, splitting the keys over programs does not pay

_MANY_SLOTS = 1024
"""From this many slots on the kernel serves any number of rows: it reads what each row holds, while
torch reads all slots of every row, and the mask."""

_ROWS_PER_PROGRAM = 64  # Query rows of one program of torch's memory-efficient attention

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def kernel_is_faster(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the kernel attends faster than torch, for [rows, heads, width or slots, dim].

    Torch's attention under a mask reads all keys of 64 query rows in one program. If that leaves
    processors of the GPU idle, the kernel is faster, because it splits the keys. With many slots it
    is, too, because it reads only what each row holds. Shapes alone decide, so that a text has the
    same bits whatever else the machine does. If LOOKAHEAD_HF_BACKEND asks for Triton, the kernel
    always serves.
    """
    if max(query.shape[3], value.shape[3]) > MAX_HEAD_DIM or query.dtype not in _DTYPES:
        return False
    # Triton's interpreter multiplies the bit patterns of bfloat16.
    if query.device.type == "cpu" and query.dtype == torch.bfloat16:
        return False
    if kernels.is_asked_for():
        return True
    rows, heads, width, _ = query.shape
    kv_heads, slots, _ = value.shape[1:]
    folded = heads // kv_heads * width
    programs = rows * kv_heads * -(-folded // _ROWS_PER_PROGRAM)
    if slots >= _MANY_SLOTS:
        return True
    return slots >= _LEAST_SLOTS and programs < _processors(query.device)


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def attend_by_kernel(
    block: Block,
    held: HeldSlots,
    query: torch.Tensor,  # [rows, heads, width, dim]
    key: torch.Tensor,  # [rows, kv_heads, slots, dim]
    value: torch.Tensor,  # [rows, kv_heads, slots, v_dim]
    scaling: float | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [heads]
) -> torch.Tensor:  # [rows, width, heads, v_dim]
    """Attend as under the block's mask, without reading it, in layers that hold `held`."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    window = held.kind.window or 0
    return kernels.tree_attention(
        q,
        k,
        v,
        held.lengths,
        block.words,
        query.shape[3] ** -0.5 if scaling is None else scaling,
        window=window,
        columns=held.columns if window else None,
        pads=held.offsets,
        softcap=softcap or 0.0,
        sinks=sinks,
        by_length=block.by_length,
    )
