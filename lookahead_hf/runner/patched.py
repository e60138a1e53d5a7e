"""All patches of a model in one context."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from torch import nn

from lookahead_hf.call import optional
from lookahead_hf.model import compat
from lookahead_hf.model.facts import facts_of
from lookahead_hf.model.state import state_of
from lookahead_hf.runner import attention, implicit_positions
from lookahead_hf.runner.install import set_own, shared_change


def patched(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which our forwards of a model follow their `ForwardContext`.

    All other forwards, such as those of other threads meanwhile, are the model's own. What was
    given to `torch.compile` runs uncompiled.
    """
    state = state_of(model)
    undo, configs = state.patches, attention.configs_of(model)

    def put() -> None:
        attention.install(model, configs)
        if not undo:
            _remove_compiled(model, undo)
            give = partial(set_own, undo)
            implicit_positions.install(model, give)
            if facts_of(model).mixers:
                optional.load("recurrent states").install(model, give)

    def remove() -> None:
        attention.remove(configs)
        while undo:
            undo[-1]()
            undo.pop()

    return shared_change(state.patch_users, put, remove)


def _remove_compiled(model: nn.Module, undo: list[Callable[[], None]]) -> None:
    """Have a model run what `torch.compile` was given, and add to `undo` what reverts it.

    Compiled code is specialised to shapes, and those of drafts differ from step to step.
    """
    for module in model.modules():
        own = vars(module)
        for name in (compat.CALL, "forward"):
            compiled = own.get(name)
            given = compat.compiled_from(compiled)
            if given is None:
                continue
            undo.append(partial(own.__setitem__, name, compiled))  # first, for interrupts
            del own[name]
            if name == "forward" and module.forward != given:
                own[name] = given
