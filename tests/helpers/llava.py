"""A tiny model of pictures and text."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from tests.helpers.models import characters, tiny


def tiny_llava(
    text: Any = None, tokenizer: Any = None, image_token: str = "#", **settings: Any
) -> tuple[Any, Any]:
    """A tiny model that reads pictures, with its processor.

    `text` is the configuration of its model of text, by default the tiny Llama's. The default
    tokenizer is one of single characters.
    """
    pytest.importorskip("PIL")
    tokenizer = tokenizer or characters(pad_token="!", extra_special_tokens={"image_token": "#"})
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        image_size=16, patch_size=8, projection_dim=16,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text or tiny("llama").config,
        image_token_id=tokenizer.convert_tokens_to_ids(image_token),
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        ),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=image_token,
        **settings,
    )
    return model, processor
