"""Load the model of an example: `--model FOLDER_OR_HUB_NAME`, by default the demo's small one."""

from __future__ import annotations

import argparse
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import lookahead_hf


def load() -> tuple[Any, Any]:
    """An enabled model in fp32 and its tokenizer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder or a hub name")
    name = parser.parse_args().model or demo_model()
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float32").eval()
    lookahead_hf.enable(model)
    lookahead_hf.warm_up(model)  # optional: the first calls would otherwise compile and measure
    return model, tokenizer


def demo_model() -> str:
    """The folder of the demo's model, fetched once."""
    from lookahead_hf.cli.real_model import ensure_demo_model

    return str(ensure_demo_model())


def ask(tokenizer: Any, *prompts: str) -> Any:
    """Prompts as the model expects them: `input_ids` and `attention_mask`, [prompts, columns]."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        for prompt in prompts
    ]
    return tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
