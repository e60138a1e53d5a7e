"""What `generate` does before and beside its decoding loop."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.generation import utils as generation_utils


def prefill(
    model: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any]
) -> Any:
    """Run the prompt through the model exactly as plain `generate` does."""
    return model._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=True)


def set_up_for_decoding(model: Any) -> AbstractContextManager[Any]:
    """What `generate` changes about a model for its decoding loop, behind the prompt."""
    context: AbstractContextManager[Any] = model._optimize_model_for_decode()
    return context


def has_own_generate(model: Any) -> bool:
    """Whether the model's class brings a `generate` of its own."""
    return bool(type(model).generate is not GenerationMixin.generate)


def is_stateful(model: Any) -> bool:
    """Whether the model keeps a recurrent state."""
    return bool(getattr(model, "_is_stateful", False))


def has_own_loop(model: Any) -> bool:
    """Whether the model's class brings a decoding loop in place of plain `generate`'s."""
    return bool(type(model)._sample.__module__ != generation_utils.__name__)


def num_tensor_parallel(model: Any) -> int:
    """Processes that share each of the model's matrices."""
    return int(getattr(model, "_tp_size", None) or 1)


def num_pipeline(model: Any) -> int:
    """Processes that run some of the model's layers each."""
    mesh = getattr(model, "_device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return int(mesh.shape[names.index("pp")]) if mesh is not None and "pp" in names else 1


def are_unfinished(model: Any, is_finished: bool, device: torch.device) -> bool:
    """Tell all processes whether the texts of this one have ended, and hear whether any go on."""
    return bool(model._has_unfinished_sequences(is_finished, True, device))


def synced_gpus(model: Any, given: bool | None) -> bool:
    """Whether processes must step together, as `generate` itself works it out.

    `generate` computes it in here and then drops it for strategies that it is given.
    """
    return bool(model._extract_generation_mode_kwargs(None, {}, given, None, None)["synced_gpus"])


def known_mask_length(generation_config: Any, model_kwargs: dict[str, Any]) -> int | None:
    """Columns of the attention mask, where `generate` dropped it because it was all ones too."""
    mask = model_kwargs.get("attention_mask")
    if mask is not None:
        return int(mask.shape[1])
    return getattr(generation_config, "_mask_length", None)


def pad_token(generation_config: Any) -> int | None:
    """The pad token id that `generate` settled on, if any."""
    tensor = getattr(generation_config, "_pad_token_tensor", None)
    return None if tensor is None else int(tensor)
