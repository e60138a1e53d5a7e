"""Finds the transformers model inside the wrappers of other libraries."""

from __future__ import annotations

from typing import Any

MOST_WRAPPERS = 16
"""Most nested wrappers that are unwrapped; a mock would contain wrappers without end."""


def unwrap(model: Any) -> Any:
    """Return the transformers model inside wrappers; ValueError if there is none."""
    from transformers import GenerationMixin  # so that statistics can be read without torch

    inner = model
    for _ in range(MOST_WRAPPERS):
        if inner is None or isinstance(inner, GenerationMixin):
            break
        inner = _inside(inner)
    if not isinstance(inner, GenerationMixin):
        raise _not_a_model(model)
    return inner


def _inside(wrapper: Any) -> Any:
    """Return the next object inside a wrapper, None for an unknown wrapper."""
    from torch import nn

    if isinstance(wrapper, type):
        return None
    if callable(base := getattr(wrapper, "get_base_model", None)):
        return base()  # PEFT
    # torch.compile; DistributedDataParallel and FSDP; quantisers' wrappers and pipelines.
    for name in ("_orig_mod", "module", "model"):
        inner = getattr(wrapper, name, None)
        if isinstance(inner, nn.Module) and inner is not wrapper:
            return inner
    return None


def _not_a_model(model: Any) -> ValueError:
    if model is None:
        return ValueError(
            "expected a model, got None; enable_everywhere() enables every model of the process"
        )
    if isinstance(model, type):
        return ValueError(
            f"{model.__name__} is a class: pass a model object, derive a class of your own from "
            "SpeculativeMixin and it, or use enable_everywhere()"
        )
    if isinstance(model, str):
        return ValueError(
            f"{model!r} is a name, not a model: load the model first, as in "
            f"model = AutoModelForCausalLM.from_pretrained({model!r})"
        )
    return ValueError(
        f"{type(model).__name__} is not a transformers model that can generate (no "
        "GenerationMixin), and does not contain one"
    )
