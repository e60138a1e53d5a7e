"""Tiny random models that read pictures, hear sound or have an encoder, and their inputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.helpers.architectures import check_size, small_config, with_sdpa
from tests.helpers.models import VOCAB, built, pair

PICTURE, SOUND = VOCAB - 3, VOCAB - 2
"""The tokens that stand for a part of a picture, or of a recording."""

CLASSES: dict[str, str] = {
    **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "audioflamingo3": "AudioFlamingo3ForConditionalGeneration",
}
"""Model types that read pictures or hear sound, and their classes."""

ALL_CLASSES = {**modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, **CLASSES}
"""These and the encoder-decoders of text."""

_NAMES = {
    32: "embed_dim encoder_hidden_size vision_hidden_size mm_hidden_size out_hidden_size "
    "projection_dim output_dim audio_hidden_size projector_hidden_size text_embed_dim",
    48: "mlp_dim",
    2: "depth vision_layers encoder_num_hidden_layers decoder_num_hidden_layers num_global_layers",
    4: "vision_num_heads encoder_num_attention_heads decoder_num_attention_heads num_query_tokens "
    "attention_heads",
    8: "num_mel_bins max_source_positions",
}
_SMALL = {name: size for size, names in _NAMES.items() for name in names.split()}

_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_SECTIONS_OF_2 = {**_SECTIONS, "mrope_section": [1, 1, 0]}
_GEMMA4 = {
    "vision_config": {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "patch_size": 8},
        "position_embedding_size": 16,
    },
    "audio_config": None,
}
_OF_TYPE: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {4: 2}},
    "audioflamingo3_encoder": {"max_source_positions": 16},
    **dict.fromkeys(
        ("glm4v_text", "paddleocr_vl_text", "qwen2_vl_text", "qwen2_5_vl_text")
        + ("qwen2_5_omni_text",),
        {"rope_parameters": _SECTIONS},
    ),
    **dict.fromkeys(("glm4v_moe_text", "glm_ocr_text"), {"rope_parameters": _SECTIONS_OF_2}),
    "blip-2": {"image_token_index": PICTURE},
    "gemma4": _GEMMA4,
    "qwen2_audio_encoder": {"max_source_positions": 16},
    "hunyuan_vl_text": {"rope_parameters": {**_SECTIONS, "mrope_section": [1, 1, 1, 1]}},
    "florence_vision": {
        **{"depths": (1, 1), "patch_size": (3, 3), "patch_stride": (2, 2)},
        **{"patch_padding": (1, 1), "patch_prenorm": (False, True), "embed_dim": (16, 32)},
        **{"num_heads": (2, 4), "num_groups": (2, 4), "window_size": 4},
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "idefics2": {"perceiver_config": {"resampler_n_latents": 4, "resampler_depth": 1}},
    "llama4_vision_model": {
        **{"intermediate_size": 128, "projector_input_dim": 32, "projector_output_dim": 32},
        "vision_output_dim": 32,
    },
    "llava_next": {"image_grid_pinpoints": [[16, 16], [16, 32]]},
    "llava_next_video": {"image_grid_pinpoints": [[16, 16], [16, 32]]},
    "llava_onevision": {"image_grid_pinpoints": [[16, 16], [16, 32]]},
    "mllama_text_model": {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 96},
    "pixtral": {"image_size": 32},
    "qwen3_omni_moe_text": {"sliding_window": None},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "voxtral_encoder": {"intermediate_size": 128, "max_source_positions": 16},
}
"""Fields of types whose sizes must fit each other."""

_PAIRS = {"encoder-decoder": ("bert", "bert"), "vision-encoder-decoder": ("trocr", "vit")}
"""Types that consist of two models: those of the decoder and the encoder."""

_PLACEHOLDERS = {
    **dict.fromkeys(("image_token_id", "image_token_index"), PICTURE),
    **dict.fromkeys(("audio_token_id", "audio_token_index"), SOUND),
    **dict.fromkeys(("video_token_id", "video_token_index"), VOCAB - 4),
    **dict.fromkeys(("vision_start_token_id", "image_start_token_id"), VOCAB - 5),
    **dict.fromkeys(("vision_end_token_id", "image_end_token_id"), VOCAB - 6),
}
"""Tokens that stand for inputs of other kinds, by the names that configurations have for them."""


def build(model_type: str, scale: float = 3.0) -> Any:
    """Return a tiny model of one of `ALL_CLASSES` in eval mode.

    It raises anything if these sizes do not make a model of this type, or a package is missing.
    """
    if model_type in _PAIRS:
        model = pair(*_PAIRS[model_type])
        model.generation_config.pad_token_id = 0
        return model
    kind = CONFIG_MAPPING[model_type]
    config = small_config(kind, model_type, _SMALL, _OF_TYPE)
    for name, token in _PLACEHOLDERS.items():
        if hasattr(config, name):
            setattr(config, name, token)
    if "omni" in model_type:  # their checkpoints have it, their class has no default for it
        config.vision_start_token_id = _PLACEHOLDERS["vision_start_token_id"]
    config.is_encoder_decoder = kind().is_encoder_decoder
    model_class = getattr(transformers, ALL_CLASSES[model_type])
    check_size(model_class, config)

    def make(config: Any, attn_implementation: str) -> Any:
        model = with_sdpa(model_class._from_config)(config, attn_implementation).float()
        _let_pictures_matter(model)
        return model

    model = built(make, config, scale=scale)
    model.generation_config.update(num_beams=1, pad_token_id=0, forced_bos_token_id=None)
    if config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        model.generation_config.decoder_start_token_id = 1
    return model


def _let_pictures_matter(model: Any) -> None:
    """Give the matrices before the decoder a size at which features reach the text undiminished."""
    text = {id(parameter) for parameter in model.get_decoder().parameters()}
    text |= {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    text |= {id(parameter) for parameter in model.get_output_embeddings().parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and id(parameter) not in text:
                parameter.normal_(std=0.6 * parameter[0].numel() ** -0.5)
            elif name.endswith("_gate"):  # Mllama opens them in training
                parameter.fill_(1.0)


def call(
    model: Any,
    counts: Sequence[int] = (1,),
    lengths: Sequence[int] = (9,),
    seed: int = 0,
    text_seed: int = 0,
) -> dict[str, Any]:
    """Return what a processor makes of texts with pictures or recordings, left-padded.

    `counts` are the pictures of every row, `lengths` its words. ValueError if the model reads
    nothing in any form that is known here.
    """
    generator = torch.Generator().manual_seed(seed)
    names = set(inspect.signature(type(model).forward).parameters)
    errors = []
    for given in _forms(model, names, counts, generator):
        try:
            places = _places(model, given, sum(counts))
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
            errors.append(f"{type(error).__name__}: {error}")
            continue
        if model.main_input_name != "input_ids" and "input_ids" not in names:
            return given
        return {**given, **_texts(model, names, counts, lengths, places, text_seed)}
    raise ValueError(f"no form of input fits: {errors}")


def _forms(
    model: Any, names: set[str], counts: Sequence[int], generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    """Yield the forms that processors give to pictures and sounds, the likelier ones first."""

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    count, rows, most = sum(counts), len(counts), max(counts)
    vision = getattr(model.config, "vision_config", None) or model.config
    size, patch = _number(vision, "image_size", 16), _number(vision, "patch_size", 8)
    channels = _number(vision, "num_channels", _number(vision, "in_channels", 3))
    sizes = torch.tensor([[size, size]] * count)
    if "image_grid_thw" in names:
        times = _number(vision, "temporal_patch_size", 1)
        grids = {"image_grid_thw": torch.tensor([[1, 4, 4]] * count)}
        yield {"pixel_values": noise(16 * count, channels * times * patch**2), **grids}
        yield {"pixel_values": noise(16 * count, channels, patch, patch), **grids}
        yield {"pixel_values": noise(16 * count, channels * patch**2), **grids}
        merges = {"image_merge_sizes": torch.ones(count, dtype=torch.long)}
        yield {"pixel_values": noise(16 * count, channels * patch**2), **grids, **merges}
    elif "image_position_ids" in names:
        places = torch.cartesian_prod(torch.arange(6), torch.arange(6)).flip(-1)
        for edge in (patch, 3 * patch):
            yield {
                "pixel_values": noise(count, 36, channels * edge**2).sigmoid(),
                "image_position_ids": places[None].repeat(count, 1, 1),
            }
    elif "aspect_ratio_ids" in names:
        tiles = vision.max_num_tiles
        shown = torch.zeros(rows, most, tiles, dtype=torch.long)
        for row, of_row in enumerate(counts):
            shown[row, :of_row, 0] = 1
        yield {
            "pixel_values": noise(rows, most, tiles, channels, size, size),
            "aspect_ratio_ids": shown[..., 0],
            "aspect_ratio_mask": shown,
        }
    elif "pixel_attention_mask" in names:
        pixels = noise(rows, most, channels, size, size)
        for row, of_row in enumerate(counts):
            pixels[row, of_row:] = 0  # as processors fill the place of a missing picture
        yield {"pixel_values": pixels}
    elif "pixel_values" in names:
        yield {"pixel_values": noise(count, channels, size, size)}
        yield {"pixel_values": noise(count, channels, size, size), "image_sizes": sizes}
        yield {"pixel_values": noise(count, 2, channels, size, size), "image_sizes": sizes}
    if "input_features" in names:
        yield from _sounds(model, names, count, noise)
    if "input_values" in names:
        yield {"input_values": noise(count, 1600)}
    if not names & {"pixel_values", "input_features", "input_values"}:
        yield {}


def _sounds(model: Any, names: set[str], count: int, noise: Any) -> Iterator[dict[str, Any]]:
    """Yield the forms of recordings: spectra, with a mask if there is an argument for it."""
    audio = getattr(model.config, "audio_config", None) or model.config
    frames = 2 * _number(audio, "max_source_positions", 16)
    bands = _number(audio, "num_mel_bins", 8)
    masks = [name for name in ("input_features_mask", "feature_attention_mask") if name in names]
    for shape in ((bands, frames), (frames, bands)):
        spectra = {"input_features": noise(count, *shape)}
        yield {**spectra, **{name: torch.ones(count, frames, dtype=torch.long) for name in masks}}


def _number(config: Any, name: str, default: int) -> int:
    """Return a field of a configuration, its first number where it has several."""
    value = getattr(config, name, None) or default
    return value if isinstance(value, int) else int(value[0])


def _places(model: Any, given: dict[str, Any], count: int) -> int:
    """Return how many tokens stand for one picture or recording, none for other arguments."""
    owners = [model, getattr(model, "model", None)]
    kind = "image" if "pixel_values" in given else "audio"
    found = (getattr(owner, f"get_{kind}_features", None) for owner in owners)
    read = next((each for each in found if each), None)
    if "feature_attention_mask" in given and read is None:
        frames = given["feature_attention_mask"].sum(-1)
        return int(model.model.audio_tower._get_feat_extract_output_lengths(frames)[1][0])
    if read is None or not given or "aspect_ratio_ids" in given:
        return 0
    with torch.no_grad():
        features: Any = read(**given, return_dict=True)
    if not isinstance(features, (torch.Tensor, list, tuple)):
        found = features.pooler_output
        features = features.last_hidden_state if found is None else found
    parts = [features] if isinstance(features, torch.Tensor) else list(features)
    return sum(part.numel() // part.shape[-1] for part in parts) // count


def _texts(
    model: Any,
    names: set[str],
    counts: Sequence[int],
    lengths: Sequence[int],
    places: int,
    seed: int,
) -> dict[str, Any]:
    """Return token ids of all rows, left-padded, with the mask and the kinds of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    is_heard = getattr(model.config, "image_token_id", None) is None and any(
        getattr(model.config, name, None) == SOUND
        for name in ("audio_token_id", "audio_token_index")
    )
    placeholder, rows = SOUND if is_heard else PICTURE, []
    for count, length in zip(counts, lengths, strict=True):
        words = torch.randint(3, VOCAB - 10, (length,), generator=generator).tolist()
        shown = [token for word in words[:count] for token in [word] + [placeholder] * places]
        rows.append(shown + words[count:])
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    texts = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    if "mm_token_type_ids" in names:
        texts["mm_token_type_ids"] = (ids == placeholder).long()
    if "token_type_ids" in names:
        is_gemma = "gemma3" in model.config.model_type
        texts["token_type_ids"] = (ids == placeholder).long() * is_gemma
    if "cross_attention_mask" in names:
        tiles = torch.tensor([1, 0, 0, 0])  # of a picture that is no larger than a tile
        texts["cross_attention_mask"] = tiles.expand(len(rows), width, max(counts), 4).clone()
    return texts
