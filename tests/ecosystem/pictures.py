"""A caller that shows a model pictures."""

from __future__ import annotations

from typing import Any

import torch
import transformers

import lookahead_hf
from tests.ecosystem.callers import GREEDY, PROMPT
from tests.ecosystem.room import Caller, Room, asking

TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def llava(room: Room) -> tuple[Any, Any]:
    """A tiny model that reads pictures, and its processor."""
    tokenizer = room.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.image_token = "<image>"
    tokenizer.chat_template = TEMPLATE
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        image_size=16, patch_size=8, projection_dim=16,
    )  # fmt: skip
    text = transformers.AutoConfig.from_pretrained(room.folder(None))
    text.vocab_size = len(tokenizer)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=len(tokenizer) - 1
    )
    torch.manual_seed(0)
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
        image_token="<image>",
        chat_template=TEMPLATE,
    )
    return model, processor


def picture() -> Any:
    from PIL import Image

    return Image.new("RGB", (16, 16), (255, 0, 0))


def image_text_to_text(room: Room, speculative: Any) -> Any:
    model, processor = llava(room)
    build = lookahead_hf.pipeline if speculative else transformers.pipeline
    pipe = build(
        "image-text-to-text", model=model, processor=processor, device="cpu", **asking(speculative)
    )
    return pipe(images=picture(), text="<image>" + PROMPT, generate_kwargs=GREEDY)


PIPELINE = Caller(
    "pipeline image-text-to-text",
    "`lookahead_hf.pipeline(...)`",
    image_text_to_text,
    ("PIL",),
    note="transformers' pipeline drops `speculative=True`; ours moves it into generate_kwargs",
)
