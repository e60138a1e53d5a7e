"""A caller that shows a model pictures."""

from __future__ import annotations

from typing import Any

import transformers

import lookahead_hf
from tests.ecosystem.callers import GREEDY, PROMPT
from tests.ecosystem.room import Caller, Room, asking
from tests.helpers.llava import tiny_llava

TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def image_text_to_text(room: Room, speculative: Any) -> Any:
    from PIL import Image

    tokenizer = room.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.image_token, tokenizer.chat_template = "<image>", TEMPLATE
    text = transformers.AutoConfig.from_pretrained(room.folder(None))
    text.vocab_size = len(tokenizer)
    model, processor = tiny_llava(text, tokenizer, "<image>", chat_template=TEMPLATE)
    build = lookahead_hf.pipeline if speculative else transformers.pipeline
    pipe = build(
        "image-text-to-text", model=model, processor=processor, device="cpu", **asking(speculative)
    )
    picture = Image.new("RGB", (16, 16), (255, 0, 0))
    return pipe(images=picture, text="<image>" + PROMPT, generate_kwargs=GREEDY)


PIPELINE = Caller(
    "pipeline image-text-to-text",
    "`lookahead_hf.pipeline(...)`",
    image_text_to_text,
    ("PIL",),
    note="transformers' pipeline drops `speculative=True`; ours moves it into generate_kwargs",
)
