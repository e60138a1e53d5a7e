"""Facts about a model, read in one walk over it, and everything that its results depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from lookahead_hf.model import compat
from lookahead_hf.model.state import state_of


class ModelFacts:
    """Facts that take a walk over the modules, read anew as each call begins."""

    def __init__(self, model: Any, named: Sequence[tuple[str, nn.Module]]) -> None:
        """Read a model; `named` are all of its modules, a shared one under each of its names."""
        modules = list(dict.fromkeys(module for _, module in named))
        self.key = _key(model)  # changes if class, configuration, mode or hooks do
        self.attention_configs = compat.configs_of(modules)
        kinds: set[Any] = {type(module) for module in modules}
        found = [each for m in modules for each in compat.parameters_of(m).values()]
        own = [parameter for parameter in found if parameter is not None]
        self.devices = {parameter.device for parameter in own}
        self.has_experts = any("Expert" in kind.__name__ for kind in kinds)
        self.is_hooked = any(map(compat.is_hooked, modules))  # by the caller
        self.needs_columns = compat.counts_positions(model)
        self.repeats_layers = compat.repeats_layers(named)
        self.is_stock = compat.is_stock(model, modules) and not self.repeats_layers
        # Weakly, since a module may refer to the model, too.
        mixers = set(filter(compat.is_mixer, kinds))
        self._mixers = [ref(module) for module in modules if type(module) in mixers]

    @property
    def mixers(self) -> list[Any]:
        """The modules whose forward reads and writes a recurrent state in the cache."""
        found = (reference() for reference in self._mixers)
        return [module for module in found if module is not None]


def read(model: nn.Module) -> list[nn.Module]:
    """Read the facts of a model again, and return its modules."""
    named = list(model.named_modules(remove_duplicate=False))
    state_of(model).put(ModelFacts(model, named))
    return [module for _, module in named]


def facts_of(model: nn.Module) -> ModelFacts:
    """Return the facts that the latest call on a model has read."""
    facts = state_of(model).get(ModelFacts)
    if facts is None or facts.key != _key(model):
        read(model)
        facts = state_of(model).get(ModelFacts)
        assert facts is not None
    return facts


def _key(model: Any) -> tuple[Any, ...]:
    return id(type(model)), id(model.config), model.training, compat.is_hooked(model)


class Numerics(NamedTuple):
    """Everything but the weights that changes a model's results. Self tests are keyed by it."""

    dtype: torch.dtype
    device: torch.device
    autocast: torch.dtype | None  # that `torch.autocast` computes in on this thread
    matmul: str  # `torch.get_float32_matmul_precision()`
    attention: tuple[str, ...]  # names of the model's attention implementations

    @property
    def is_exact(self) -> bool:
        """Whether everything is computed in float32 or wider."""
        is_wide = self.dtype in (torch.float32, torch.float64)
        return is_wide and self.autocast is None and self.matmul == "highest"


def numerics_of(model: Any) -> Numerics:
    """Return the numerics of a model's forward on this thread now."""
    kind = model.device.type  # "meta" where weights are elsewhere between forwards
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    names = (compat.attention_name(config) for config in facts_of(model).attention_configs)
    return Numerics(
        model.dtype,
        model.device,
        torch.get_autocast_dtype(kind) if casts else None,
        torch.get_float32_matmul_precision(),
        tuple((name or "").removeprefix("lookahead:") for name in names),
    )
