"""What a traced forward has frozen of a model: compared between calls, and before every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lookahead_hf import compat
from lookahead_hf.target import attention

ALIKE_IN_TRAINING = (torch.nn.Linear, torch.nn.Embedding)
"""Modules that do the same in training mode, in which `resize_token_embeddings` leaves them."""

NUMBERS_AND_TEXTS = frozenset({int, float, bool, str})

_MODULES_OWN = frozenset(vars(torch.nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def refusal(model: Any) -> str | None:
    """What can be seen to forbid recording before anything was tried; None if nothing."""
    if model.config.is_encoder_decoder or compat.reads_lengths(model):
        return "its forwards look at lengths themselves"
    if any(compat.attention_name(c) != attention.OURS for c in compat.attention_configs(model)):
        return "its attention is its own"
    if torch.is_autocast_enabled("cpu") or torch.is_grad_enabled():
        return "autocast or autograd is on"
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return "calls of torch are being watched"
    hooks = torch.nn.modules.module
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        return "modules have hooks"
    for module in model.modules():
        if module.training and type(module) not in ALIKE_IN_TRAINING:
            return "it is being trained"
        has_hooks = module._forward_hooks or module._forward_pre_hooks
        if (has_hooks and module is not model) or "_hf_hook" in vars(module):
            return "modules have hooks"
        if "forward" in vars(module) or vars(module).get("_compiled_call_impl") is not None:
            return "a forward was replaced"
    tensors = (*model.parameters(), *model.buffers())
    if any(type(t) not in (torch.Tensor, torch.nn.Parameter) for t in tensors):
        return "its weights are tensors of their own kind"
    if any(t.device.type != "cpu" for t in tensors):
        return "not all weights are on the CPU"
    return None


def settings(model: Any) -> tuple[Any, ...]:
    """What a forward may read in Python and a trace has frozen: numbers, flags and texts.

    Those of modules, such as the scaling of adapters, of configurations, and of torch.
    """
    modules = [
        [(name, _plain(value)) for name, value in vars(module).items() if name not in _MODULES_OWN]
        for module in model.modules()
    ]
    configs = [_plain(vars(config)) for config in compat.attention_configs(model)]
    return (
        hash((tuple(map(tuple, modules)), tuple(configs))),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.backends.mkldnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
    )


def _plain(value: Any) -> Any:
    """A number, a text or a container of such, so that it can be compared; None for others."""
    kind = type(value)
    if kind in NUMBERS_AND_TEXTS:
        return value
    if kind is dict:
        return tuple((name, _plain(item)) for name, item in value.items())
    if kind in (list, tuple):
        return tuple(map(_plain, value))
    return None


class Standing:
    """What the modules of a model hold: parameters, parts, hooks and attributes of their own.

    A processor or a streamer may switch an adapter, hook a layer or replace a weight in the middle
    of a call, and plain `generate` does the next step with that. For 400 modules a comparison takes
    a tenth of a millisecond.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Remember what the model holds now."""
        self._sized: list[Any] = []
        self._held: list[tuple[dict[Any, Any], Any, Any]] = []
        for module in model.modules():
            own = vars(module)
            self._sized += [own, *(own[name] for name in _HOOKS if module is not model)]
            for holder in (own["_parameters"], own["_buffers"], own["_modules"]):
                self._held += [(holder, name, value) for name, value in holder.items()]
            self._held += _attributes(own)
        self._size = sum(map(len, self._sized))

    def is_current(self) -> bool:
        """Whether the model still holds just that, the same objects by the same names."""
        if sum(map(len, self._sized)) != self._size:
            return False
        return all(holder.get(name) is value for holder, name, value in self._held)


def _attributes(own: dict[str, Any]) -> Iterator[tuple[dict[Any, Any], Any, Any]]:
    """A module's attributes beside those that every module has, and what stands in their dicts."""
    for name, value in own.items():
        if name not in _MODULES_OWN:
            yield own, name, value
            if type(value) is dict:
                yield from ((value, key, item) for key, item in value.items())
