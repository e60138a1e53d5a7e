"""A module's hooks around something that stands for its forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast


def with_hooks(
    model: Any, model_inputs: dict[str, Any], repeated: Callable[[], torch.Tensor | None]
) -> Any:
    """Call the model's own hooks around a repeated forward, as torch does around its own.

    Where a hook gives other arguments, or repeating fails, the model's forward is run.
    """
    args: tuple[Any, ...] = ()
    kwargs = {**model_inputs, "return_dict": True}
    given = kwargs
    for number, hook in list(model._forward_pre_hooks.items()):
        if number in model._forward_pre_hooks_with_kwargs:
            changed = hook(model, args, kwargs)
            args, kwargs = (args, kwargs) if changed is None else changed
        else:
            changed = hook(model, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    logits = repeated() if kwargs is given and not args else None
    if logits is None:
        outputs = model.forward(*args, **kwargs)
    else:
        outputs = CausalLMOutputWithPast(logits=logits, past_key_values=given["past_key_values"])
    for number, hook in list(model._forward_hooks.items()):
        takes_kwargs = number in model._forward_hooks_with_kwargs
        changed = hook(model, args, *([kwargs] if takes_kwargs else []), outputs)
        outputs = outputs if changed is None else changed
    return outputs
