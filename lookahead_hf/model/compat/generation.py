"""What `generate` does before its decoding loop and beside it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import utils as generation_utils

from lookahead_hf.model.compat.forwards import PROMPT_ONLY, TOKEN_TYPES, decoder_names, text_config

MOST_GATHERED = 8
"""Most tokens of a step that copies the weights of their experts, as plain `generate` does."""


def plain_generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the `generate` of the model's class, past any hook."""
    generate = inspect.unwrap(type(model).generate, stop=_is_from_transformers)
    return generate(model, *args, **kwargs)


def _is_from_transformers(function: Any) -> bool:
    """Return whether a function, with the wrappers that transformers gives it, is its own."""
    own = getattr(function, "__globals__", {})
    return str(own.get("__name__")).partition(".")[0] in ("torch", "transformers")


def prefill(
    model: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any]
) -> Any:
    """Run the prompt through the model exactly as plain `generate` does."""
    return model._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=True)


def plain_step(
    model: Any, input_ids: torch.Tensor, is_prompt: bool, model_kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Run a forward of a decoder as the loop of plain `generate` does.

    Of `input_ids`, the whole text, [rows, tokens], only the last token is fed unless `is_prompt`.
    Returns the outputs, and the arguments for the next step.
    """
    count = input_ids.shape[1] if is_prompt else 1
    first = {"is_first_iteration": True} if is_prompt else {}
    inputs = model.prepare_inputs_for_generation(
        input_ids, next_sequence_length=count, **first, **model_kwargs
    )
    outputs = model(**inputs, return_dict=True)
    update = model._update_model_kwargs_for_generation
    return outputs, update(outputs, model_kwargs, is_encoder_decoder=False)


def prepared_positions(
    model: Any, name: str, input_ids: torch.Tensor, model_kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Return the positions that the prompt's forward gets as `name`, None if it gets none.

    Some models change those that `generate` has prepared: PaliGemma counts from 1, and EXAONE 4.5
    counts the pads of the prompt, too.
    """
    prepare: Any = type(model).prepare_inputs_for_generation
    if prepare is GenerationMixin.prepare_inputs_for_generation:
        return model_kwargs[name]
    inputs = prepare(model, input_ids, is_first_iteration=True, **model_kwargs)
    return inputs.get(name)


def forwarded(model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments without those that plain `generate` accepts and passes to no forward.

    A trainer's `labels` are one of them. transformers' own preparation of a forward tells which; a
    model's own may read an argument and pass on something derived from it.
    """
    known = decoder_names(model).prepared | PROMPT_ONLY | {*TOKEN_TYPES}
    others = model_kwargs.keys() - known - {"attention_mask", "encoder_outputs"}
    if not others:
        return model_kwargs
    prepare: Any = GenerationMixin.prepare_inputs_for_generation
    left_out = others - set(prepare(model, input_ids, is_first_iteration=True, **model_kwargs))
    return {name: value for name, value in model_kwargs.items() if name not in left_out}


def set_up_for_decoding(model: Any) -> AbstractContextManager[Any]:
    """Return the context in which `generate` runs its decoding loop, after the prompt.

    If that changes how a model's experts run, `set_up_for_step` does it instead.
    """
    if _gathers_experts(model):
        return nullcontext()
    return model._optimize_model_for_decode()


def set_up_for_step(model: Any, num_rows: int, width: int) -> AbstractContextManager[Any]:
    """Return the context of a step's forward on `num_rows` rows of `width` tokens.

    On an accelerator plain `generate` copies the weights of each token's experts ("batched_mm").
    That is fast for a few single tokens; a block takes many times the memory and time of
    "grouped_mm". If the latter waits for the host, which no graph can hold, small blocks copy up to
    as much as the experts weigh.
    """
    tokens = num_rows * width
    if tokens > MOST_GATHERED or not _gathers_experts(model):
        return nullcontext()
    if width > 1 and not (_groups_wait(model) and _num_copied(model, tokens) <= 1):
        return nullcontext()
    return model._optimize_model_for_decode()


def _groups_wait(model: Any) -> bool:
    """Return whether torch's product by groups reads their sizes on the host."""
    if model.device.type != "cuda" or torch.version.hip:
        return False
    return model.dtype != torch.bfloat16 or torch.cuda.get_device_capability(model.device)[0] < 9


def expert_counts(model: Any) -> tuple[int, int]:
    """Return the experts of a layer and how many a token chooses, 0 where that is unknown."""
    config = text_config(model)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    counts = (getattr(config, name, None) for name in names)
    count = next((count for count in counts if count), 0)
    per_token = getattr(config, "num_experts_per_tok", None) or 0
    return _most(count), _most(per_token)


def _most(count: int | Sequence[int]) -> int:
    """Return a number that layers have in common, or the largest of those of all layers."""
    return count if isinstance(count, int) else max(count)


def _num_copied(model: Any, num_tokens: int) -> float:
    """Return how often `num_tokens` tokens copy all experts; infinity if that is unknown."""
    count, per_token = expert_counts(model)
    return num_tokens * per_token / count if count and per_token else float("inf")


def _gathers_experts(model: Any) -> bool:
    """Return whether plain `generate` runs a model's experts differently in its decoding loop."""
    if model.device.type == "cpu":
        return False
    return "grouped_mm" in model.get_experts_implementation().values()


def refuses_argument(model: Any, name: str, value: Any) -> bool:
    """Return whether `generate` refuses an argument, since the model has no use for it."""
    try:
        model._validate_model_kwargs({name: value})
    except ValueError:
        return True
    return False


def has_own_generate(model: Any) -> bool:
    """Return whether the model's class has a `generate` of its own.

    It may change settings, and may pass the call to a part of the model.
    """
    return bool(type(model).generate is not GenerationMixin.generate)


def is_stateful(model: Any) -> bool:
    """Return whether the model keeps a recurrent state."""
    return bool(getattr(model, "_is_stateful", False))


def has_own_loop(model: Any) -> bool:
    """Return whether the model's class replaces the decoding loop of plain `generate`."""
    return bool(type(model)._sample.__module__ != generation_utils.__name__)


def run_loop(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the decoding loop of plain `generate` on what it has prepared."""
    return model._sample(*args, **kwargs)


def keep_unknown_settings(generation_config: Any) -> None:
    """Have a generation config keep unknown attributes when it is loaded."""
    generation_config._from_model_config = False


def set_forward_parameter(pipe: Any, name: str, value: Any) -> None:
    """Set an argument that a pipeline passes to `generate` in every call."""
    pipe._forward_params[name] = value


def num_tensor_parallel(model: Any) -> int:
    """Return the number of processes that share each of the model's matrices."""
    return int(getattr(model, "_tp_size", None) or 1)


def num_pipeline(model: Any) -> int:
    """Return the number of processes that the model's layers are divided among."""
    mesh = getattr(model, "_device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return int(mesh.shape[names.index("pp")]) if mesh is not None and "pp" in names else 1


def are_unfinished(model: Any, is_finished: bool, device: torch.device) -> bool:
    """Exchange with all processes whether texts have ended; return whether any continue."""
    return bool(model._has_unfinished_sequences(is_finished, True, device))


def synced_gpus(model: Any, given: bool | None) -> bool:
    """Return whether processes must step together, as `generate` decides it.

    `generate` computes this value too, but does not pass it to a custom decoding method.
    """
    return bool(model._extract_generation_mode_kwargs(None, {}, given, None, None)["synced_gpus"])


def known_mask_length(generation_config: Any, model_kwargs: dict[str, Any]) -> int | None:
    """Return the columns of the attention mask, even if `generate` dropped it as all ones."""
    mask = model_kwargs.get("attention_mask")
    if mask is not None:
        return int(mask.shape[1])
    return getattr(generation_config, "_mask_length", None)


def without_defaults(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return generation settings, none if all of them are transformers' defaults.

    Nobody has made these: a model's own `generate`, such as Whisper's, fills them in.
    """
    defaults = GenerationConfig._get_default_generation_params()
    is_filled = all(value == defaults.get(name) for name, value in settings.items())
    return {} if is_filled else settings


def pad_token(generation_config: Any) -> int | None:
    """Return the pad token id that `generate` uses, if any."""
    tensor = getattr(generation_config, "_pad_token_tensor", None)
    return None if tensor is None else int(tensor)


SERVERS_QUEUE, SERVERS_QUEUE_CONFIG = "_cb", "_cb_config"
"""Where transformers' server keeps the manager that decodes requests together, in what runs the
requests of a model, and its configuration, in the state of all models."""

OUTLINES_GUIDES, OUTLINES_MATCHERS = "_guides", "_matchers"
"""Where outlines' logits processors keep the state of each row: those for outlines-core and for
xgrammar."""
