"""What a traced forward has frozen of a model, compared before every step of a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_MODULES_OWN = frozenset(vars(torch.nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


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
