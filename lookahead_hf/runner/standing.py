"""What a traced forward has frozen of a model: compared between calls, and before every step."""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_
from typing import Any

import torch

from lookahead_hf import compat
from lookahead_hf.runner.values import Same, Values

ALIKE_IN_TRAINING = (torch.nn.Linear, torch.nn.Embedding)
"""Modules that do the same in training mode, in which `resize_token_embeddings` leaves them."""

NUMBERS_AND_TEXTS = frozenset({int, float, bool, str})

_LEFT_OUT = frozenset({*vars(torch.nn.Module()), "generate", "generation_config"})
"""Attributes that every module has, and what `generate` reads and a forward does not."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def global_hooks() -> list[Any]:
    """Hooks around the forwards of all modules of the process."""
    hooks = torch.nn.modules.module
    return [*hooks._global_forward_hooks.values(), *hooks._global_forward_pre_hooks.values()]


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has hooks that may do something in our forwards."""
    return not all(map(compat.captures_outputs, hooks_of(module)))


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """A module's own hooks around its forward."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def settings(model: Any, tensors: bool = True) -> tuple[Any, ...]:
    """What a forward may read in Python and a trace has frozen: equal as long as that is the same.

    What modules hold, such as the scaling of adapters, and configurations, and torch's own; see
    `Values`. For 400 modules it takes about a millisecond.

    Args:
        model: The target.
        tensors: Whether it matters which tensors stand in other attributes than parameters and
            buffers, where some models put one in every prefill.
    """
    return (
        _read(model, tensors).found,
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.backends.mkldnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
    )


def _read(model: torch.nn.Module, tensors: bool = True) -> Values:
    values = Values(tensors)
    for config in compat.attention_configs(model):
        values.attributes(vars(config))
    for module in model.modules():
        values.found.append(Same(type(module)))
        values.items(_own(module))
    return values


def _own(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's attributes beside those that every module has."""
    return ((name, value) for name, value in vars(module).items() if name not in _LEFT_OUT)


class Standing:
    """What the modules of a model hold: parameters, parts, hooks and what `settings` reads.

    A processor or a streamer may switch an adapter, hook a layer or replace a weight in the middle
    of a call, and plain `generate` does the next step with that. For 400 modules a comparison takes
    a tenth of a millisecond.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Remember what the model holds now."""
        values = _read(model)
        self._lists = [(each, tuple(each)) for each in values.lists]
        self._sized: list[Any] = [*values.dicts, *values.lists]
        self._held = [held for each in values.dicts for held in _items(each)]
        for module in model.modules():
            own = vars(module)
            self._sized += [own, *(own[name] for name in _HOOKS if module is not model)]
            for holder in (own["_parameters"], own["_buffers"], own["_modules"]):
                self._held += _items(holder)
            self._held += [(own, name, value) for name, value in _own(module)]
        self._size = sum(map(len, self._sized))

    def is_current(self) -> bool:
        """Whether the model still holds just that, the same objects by the same names."""
        if sum(map(len, self._sized)) != self._size:
            return False
        if not all(holder.get(name) is value for holder, name, value in self._held):
            return False
        return all(all(map(is_, now, then)) for now, then in self._lists)


def _items(holder: dict[Any, Any]) -> list[tuple[dict[Any, Any], Any, Any]]:
    return [(holder, name, value) for name, value in holder.items()]
