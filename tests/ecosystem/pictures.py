"""Callers that show a model pictures, and files of quantised weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers

import lookahead_hf
from tests.ecosystem.adapted import PROMPTS
from tests.ecosystem.callers import GREEDY, PROMPT
from tests.ecosystem.harnesses import GEN_KWARGS, lighteval, lm_eval
from tests.ecosystem.room import ENTRY, Caller, Room, asking, speculating, unprintable

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


def llava_folder(room: Room, speculative: Any) -> str:
    """The folder of both."""
    folder = room.scratch / f"llava {bool(speculative)}"
    if not folder.exists():
        model, processor = llava(room)
        model.generation_config.suppress_tokens = unprintable(processor.tokenizer)
        lookahead_hf.set_default(model, speculative)
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
    return str(folder)


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


def lm_eval_pictures(room: Room, speculative: Any) -> Any:
    from lm_eval.models.hf_vlms import HFMultimodalLM

    model = HFMultimodalLM(llava_folder(room, None), device="cpu", batch_size=2)
    shown = {"visual": [picture()]}
    return lm_eval(speculative, model, [("<image>" + text, shown) for text in PROMPTS])


def lighteval_pictures(room: Room, speculative: Any) -> Any:
    from lighteval.models.transformers import vlm_transformers_model as models

    kinds = models.VLMTransformersModel, models.VLMTransformersModelConfig
    return lighteval(room, *kinds, llava_folder(room, speculative), PROMPTS, images=[picture()])


def gguf(room: Room, speculative: Any) -> Any:
    """A file of 4-bit blocks, which transformers unpacks when it loads it."""
    folder = _written(room)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf").eval()
    inputs = room.tokenizer()(PROMPTS, return_tensors="pt", padding=True)
    return speculating(model, speculative).generate(**inputs, **GREEDY, pad_token_id=0).tolist()


def _written(room: Room) -> str:
    """The wide model's weights as a GGUF file."""
    import gguf as files

    source = transformers.AutoModelForCausalLM.from_pretrained(room.wide_folder(None))
    config, folder = source.config, room.scratch / "gguf"
    if folder.exists():
        return str(folder)
    folder.mkdir()
    writer = files.GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    for name, tensor in source.state_dict().items():
        array = tensor.numpy()
        kind = files.GGMLQuantizationType.Q4_1 if array.ndim == 2 else None
        if kind is not None:
            array = files.quants.quantize(array, kind)
        writer.add_tensor(_gguf_name(name), array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(folder)


_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
}


def _gguf_name(name: str) -> str:
    for ours, theirs in _PARTS.items():
        name = name.replace(ours, theirs)
    return name


PIPELINE = Caller(
    "pipeline image-text-to-text",
    "`lookahead_hf.pipeline(...)`",
    image_text_to_text,
    ("PIL",),
    note="transformers' pipeline drops `speculative=True`; ours moves it into generate_kwargs",
)
EVALUATION = [
    Caller("lm-eval, pictures", GEN_KWARGS, lm_eval_pictures, ("lm_eval", "PIL"), auto=True),
    Caller("lighteval, pictures", ENTRY, lighteval_pictures, ("lighteval", "PIL"), auto=True),
]
FILE = Caller("GGUF, Q4_1", "`enable(model)`", gguf, ("gguf", "accelerate"))
