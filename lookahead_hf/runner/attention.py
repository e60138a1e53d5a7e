"""Attention inside our forwards: the query heads of a group as rows, or our own kernel."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from lookahead_hf import compat
from lookahead_hf.model_state import state_of
from lookahead_hf.runner import torch_compile, tree_attention, unread_mask
from lookahead_hf.runner.flat import FlatBlock
from lookahead_hf.runner.shared_change import SharedChange
from lookahead_hf.runner.tree_attention import BlockTree

SERVED = ("eager", "sdpa")
"""Implementations that take an additive mask of our own. In the place of flash attention, which
takes none, steps use one of them or our kernel."""

_PREFIX = "lookahead:"
"""Before the name of the implementation that ours lies under."""


class _Name(str):
    """The name of our attention; a pickle or deep copy of it is that of the model's own."""

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.removeprefix(_PREFIX),)


_thread = threading.local()
_without_cudnn_users: set[object] = set()
_cudnn_before: list[bool] = []  # at most one


class _Step:
    """What the layers of one forward share."""

    def __init__(self, trees: Sequence[BlockTree], flat: FlatBlock | None = None) -> None:
        self.flat = flat
        self._trees = {id(tree.mask): tree for tree in trees}
        self._made: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._functions: dict[str, tuple[Any, bool]] = {}

    def tree(self, mask: torch.Tensor | None) -> BlockTree | None:
        """What is known of this very mask; a copy that the model made may say something else."""
        known = self._trees.get(id(mask))
        if known is None and self._trees and mask is not None:
            trees = self._trees.values()
            known = next((t for t in trees if unread_mask.made(t.mask) is mask), None)
        return known

    def function(self, name: str, module: nn.Module) -> tuple[Any, bool]:
        """Return the attention function registered by a name, and whether it is a stock one.

        The registry is read once per forward, so that what a caller registers counts in the next.
        """
        found = self._functions.get(name)
        if found is None:
            function = compat.attention_function(name)
            found = function, compat.is_stock_attention(function, module)
            if function is not None:  # else each module's file has its own
                self._functions[name] = found
        return found

    def folded(self, mask: torch.Tensor, groups: int) -> torch.Tensor:
        """The mask with its rows repeated once per head of a group, made once per mask."""
        known = self._made.get((id(mask), groups))
        if known is None:
            known = mask, mask.repeat(1, 1, groups, 1)  # holding the mask keeps its id taken
            self._made[id(mask), groups] = known
        return known[1]


@contextmanager
def step(
    device: torch.device | None = None,
    trees: Sequence[BlockTree] = (),
    flat: FlatBlock | None = None,
) -> Iterator[None]:
    """Mark the forward in progress, on this thread, as ours; keep cuDNN out of it on CUDA.

    There torch prefers cuDNN's attention, which builds a plan for every new length of the cache.

    Args:
        device: Where the forward runs.
        trees: Masks of the forward that the kernel can do without.
        flat: How the tokens of a flat block belong to the rows of the cache.
    """
    on_cuda = device is not None and device.type == "cuda"
    outer = getattr(_thread, "step", None)
    _thread.step = _Step(trees, flat)
    try:
        with _without_cudnn() if on_cuda else nullcontext():
            yield
    finally:
        _thread.step = outer


@contextmanager
def left_to_kernel(always: bool = True) -> Iterator[Counter[bool]]:
    """Leave attention to the kernel wherever that can attend, on this thread, if `always`.

    Yields:
        How many attentions in our forwards were the kernel's, and how many not.
    """
    outer, counts = getattr(_thread, "by_kernel", None), Counter[bool]()
    _thread.by_kernel = counts if always else None
    try:
        yield counts
    finally:
        _thread.by_kernel = outer


def _without_cudnn() -> SharedChange:
    """Keep cuDNN out of attention; the switch belongs to the whole process."""

    def switch_off() -> None:
        if not _cudnn_before:
            _cudnn_before.append(torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(False)

    def switch_back() -> None:
        if _cudnn_before:
            torch.backends.cuda.enable_cudnn_sdp(_cudnn_before[0])
            _cudnn_before.clear()

    return SharedChange(_without_cudnn_users, switch_off, switch_back)


def laid_under(model: nn.Module) -> SharedChange:
    """Return a context that puts our attention under the model's own.

    A plain call of another thread on the same model passes through our attention unchanged.
    """
    configs = compat.registry_configs(model)

    def put() -> None:
        replaced = _replaced(model)
        for config in configs:
            if (name := compat.attention_name(config)) in replaced:
                compat.set_attention_name(config, _registered(name))

    def take_out() -> None:
        for config in configs:
            if (own := _own_name(config)) != compat.attention_name(config):
                compat.set_attention_name(config, own)

    return SharedChange(state_of(model).attention_users, put, take_out)


def _replaced(model: nn.Module) -> tuple[str, ...]:
    """Implementations that ours go under: sdpa, and that of the text where it is flash attention.

    Eager attention is each modelling file's own, so only where flash attention could stand for it
    (soft-capped scores, sinks, which sdpa has not) and where our kernel may. None under compiled
    code, which was made for the name and would not stand what a step's layers share.
    """
    if torch_compile.is_compiled(model):
        return ()
    own = _own_name(compat.text_config(model))
    if own and compat.is_flash(compat.attention_function(own)):
        return ("sdpa", own)
    device = next((parameter.device for parameter in model.parameters()), None)
    if device is None or not tree_attention.serves(device, 1):
        return ("sdpa",)
    return SERVED if compat.has_only_flash_beside_eager(model) else ("sdpa",)


def is_ours_everywhere(model: nn.Module) -> bool:
    """Return whether all attention of the model, in prompts and in steps, may be ours."""
    names = {_own_name(config) for config in compat.attention_configs(model)}
    return names <= set(SERVED) and all(replaces(model, str(name)) for name in names)


def replaces(model: nn.Module, name: str) -> bool:
    """Return whether `laid_under` puts our attention under all attention of this name."""
    laid = set(map(id, compat.registry_configs(model)))
    of_name = [each for each in compat.attention_configs(model) if _own_name(each) == name]
    return name in _replaced(model) and all(id(each) in laid for each in of_name)


def _own_name(config: Any) -> str | None:
    """The name of the model's own attention, also while ours lies under it."""
    name = compat.attention_name(config)
    return None if name is None else name.removeprefix(_PREFIX)


def _registered(name: str) -> str:
    ours = _Name(_PREFIX + name)
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
        step: _Step | None = getattr(_thread, "step", None)
        attend = partial(_attend, step, name, module, dropout, scaling, kwargs)
        if step is None or step.flat is None:
            return attend(query, key, value, attention_mask)
        return step.flat.attend(attention_mask, query, key, value, attend), None

    return attention


def _attend(
    step: _Step | None,
    name: str,
    module: nn.Module,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as the function registered by a name does, in our way where we have one."""
    registered, is_stock = (step or _Step(())).function(name, module)
    more = kwargs.get("softcap"), kwargs.get("s_aux")
    if compat.is_flash(registered):
        if step is None or mask is None or mask.dim() == 2:
            named = compat.under_own_name(module, name)
            given = query, key, value, mask
            return registered(named, *given, dropout=dropout, scaling=scaling, **kwargs)
        # It takes no mask of ours. What stands in for it has all that the layer asks for.
        registered = compat.SDPA if more == (None, None) else None
    if step is not None and is_stock and kwargs.get("position_bias") is None:
        # sdpa refuses these or looks past them, as transformers' version has it.
        has_them = registered is None or more == (None, None)
        tree = step.tree(mask) if has_them else None
        if _leaves_to_kernel(tree, query, key, value, kwargs):
            assert tree is not None
            return tree_attention.attend(tree, query, key, value, scaling, *more), None
        if registered is not None and _folds(query, key, mask, kwargs):
            groups = query.shape[1] // key.shape[1]
            mask = None if mask is None else step.folded(mask, groups)
            out = fold(query, key, value, mask, groups, scaling)
            # A flat block copies it into another order, so that a copy here would be wasted.
            return (out if step.flat else out.contiguous()), None
    original = registered or compat.eager_attention(module)
    is_replaced = step is not None and registered is not None and not is_stock
    if is_replaced and mask is not None and mask.dtype != torch.bool:
        mask = mask == 0  # as transformers gives it to sdpa
    return original(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)


def _leaves_to_kernel(
    tree: BlockTree | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kwargs: dict[str, Any],
) -> bool:
    """Whether the kernel attends; it has no weights to show."""
    counts: Counter[bool] | None = getattr(_thread, "by_kernel", None)
    asked = tree_attention.is_faster if counts is None else tree_attention.can_attend
    attends = tree is not None and not kwargs.get("output_attentions")
    attends = attends and asked(query, key, value)
    if counts is not None:
        counts[attends] += 1
    return attends


def _folds(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> bool:
    """Whether there is a group to fold, and nothing that folding has no place for.

    Of single tokens that see everything it saves time in half precision: in bfloat16 on a CPU they
    take 121 instead of 623 us at context 1,100, and mostly get the same bits.
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
    """Attention of `[rows, heads, width, dim]` queries, returned as `[rows, width, heads, v_dim]`.

    SDPA with a mask copies K and V for every query head (at context 1,500 and one row 693 against
    108 us on a CPU); as rows of their group the query heads read them once.
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
