"""What `generate` does before its decoding loop and beside it; continuous batching; MTP layers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, GenerationMixin, cache_utils, modeling_layers
from transformers.generation import utils as generation_utils
from transformers.generation.continuous_batching.requests import (
    GenerationOutput as GenerationOutput,
)
from transformers.generation.continuous_batching.requests import RequestState as RequestState
from transformers.generation.continuous_batching.requests import RequestStatus as RequestStatus
from transformers.generation.continuous_batching.utils import WorkloadHints as WorkloadHints

from lookahead_hf.model.compat.attention import additive_mask, set_attention_name
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
    That is fast for single tokens; a block takes many times what "grouped_mm" takes.
    """
    if width > 1 or num_rows > MOST_GATHERED or not _gathers_experts(model):
        return nullcontext()
    return model._optimize_model_for_decode()


def _gathers_experts(model: Any) -> bool:
    """Return whether plain `generate` runs a model's experts differently in its decoding loop."""
    if model.device.type == "cpu":
        return False
    return "grouped_mm" in model.get_experts_implementation().values()


def has_own_generate(model: Any) -> bool:
    """Return whether a model's class has a `generate`, which may change settings or model."""
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


SERVERS_SOUND_READER = "_prepare_audio_inputs"
"""The method with which transformers' server reads a sound."""

SERVERS_QUEUE, SERVERS_QUEUE_CONFIG = "_cb", "_cb_config"
"""Where transformers' server keeps the manager that decodes requests together, in what runs the
requests of a model, and its configuration, in the state of all models."""

OUTLINES_GUIDES, OUTLINES_MATCHERS = "_guides", "_matchers"
"""Where outlines' processors keep the state of each row: for outlines-core and for xgrammar."""


def bytes_per_token(model: Any) -> int:
    """Return the bytes that K and V of a token take at most, from the configuration of a model."""
    config = text_config(model)
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = kv_heads if isinstance(kv_heads, int) else heads
    return int(2 * config.num_hidden_layers * kv_heads * dim * model.dtype.itemsize)


LAST_HIDDEN_STATES = {"output_hidden_states": -1}
"""Requests a forward's last hidden states; before transformers 5.23 it returns all layers'."""

_SERVED = {"full_attention", "sliding_attention"}


def last_hidden_states(outputs: Any) -> torch.Tensor | None:
    """Return the last hidden states of a forward, [rows, width, hidden], or None."""
    states = getattr(outputs, "hidden_states", None)
    return states[-1] if states else None


def load_mtp(model: Any) -> Any:
    """Load the multi-token-prediction layers of a model from its checkpoint.

    Returns an `MtpModel` that serves batches and shares the model's embeddings and output layer.
    ValueError if there are none that this version of transformers can load and this package serves.
    """
    kind: Any = getattr(modeling_layers, "MtpModel", None)
    if not hasattr(kind, "forward_layer"):
        raise ValueError(
            'the drafter "mtp" needs transformers 5.20 or newer, but this is transformers '
            f"{transformers.__version__}: update it, or leave the drafter out"
        )
    name = type(model).__name__
    if not getattr(text_config(model), "num_mtp_layers", None):
        raise ValueError(
            'the drafter "mtp" needs multi-token-prediction layers that transformers knows, but '
            f"the configuration of this {name} has no `num_mtp_layers`: leave the drafter out"
        )
    device = model.get_output_embeddings().weight.device
    try:
        with torch.inference_mode(False):  # later calls may run outside of it
            heads = kind.from_pretrained(model, device_map={"": device})
            if model.config.dtype != model.dtype:  # the model was cast after it was loaded
                heads.layers.to(model.dtype)  # and not what they share with the model
    except Exception as error:
        raise ValueError(
            f"the multi-token-prediction layers of this {name} cannot be loaded from "
            f"{model.config.name_or_path!r}: {type(error).__name__}: {error}"
        ) from error
    return serving_batches(heads, "sdpa" if model._supports_sdpa else "eager")


def serving_batches(heads: Any, attention: str) -> Any:
    """Let an `MtpModel` run on ragged batches, with the caches of `mtp_cache`; return it.

    `attention` is an implementation that takes an additive mask. ValueError if a layer is of
    neither full nor sliding attention.
    """
    kinds = getattr(heads.config, "layer_types", None) or ["full_attention"] * len(heads.layers)
    if unknown := sorted(set(kinds) - _SERVED):
        raise ValueError(
            'the drafter "mtp" serves layers of full and of sliding attention, but this model '
            f"predicts with {', '.join(unknown)}: leave the drafter out"
        )
    windows = [heads.config.sliding_window if kind != "full_attention" else None for kind in kinds]
    set_attention_name(heads.config, attention)
    heads.create_masks_for_mtp_layer = functools.partial(_masks, windows)
    heads.layers.eval()
    return heads


def mtp_cache(num_rows: int, device: torch.device) -> Any:
    """Return an empty cache for `serving_batches`.

    Its attribute `columns`, [rows, columns], says which of a row's hidden states each column of K
    and V stands for, counted from the start of the text, -1 for none.
    """
    cache = cache_utils.MtpCache()
    cache.columns = torch.zeros(num_rows, 0, dtype=torch.int64, device=device)
    return cache


def head_logits(layers: Any, states: torch.Tensor) -> torch.Tensor:
    """Return the logits of states that left a model's own draft layers, on the states' device."""
    return layers._project_to_logits(states).to(states.device)


def crop_mtp_cache(cache: Any, num_columns: int) -> None:
    """Keep the first columns of such a cache; `crop` differs between versions of transformers."""
    cache.columns = cache.columns[:, :num_columns]
    for layer in cache.layers:
        layer.keys, layer.values = (kv[..., :num_columns, :] for kv in (layer.keys, layer.values))


def _masks(
    windows: Sequence[int | None],
    layer: int,
    embedded: torch.Tensor,  # [rows, width, hidden]
    cache: Any,
    position_ids: torch.Tensor,  # [rows, width]
) -> dict[str, torch.Tensor]:
    """Replace `MtpModel.create_masks_for_mtp_layer`: a layer's token is `layer + 1` ahead."""
    query, key = (position_ids - layer - 1)[:, :, None], cache.columns[:, None]
    seen = (key >= 0) & (key <= query)  # [rows, width, columns]
    if (window := windows[layer]) is not None:
        seen &= query - key < window
    return {"attention_mask": additive_mask(seen, embedded.dtype)}
