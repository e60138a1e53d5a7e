"""What the examples share: a model (`--model FOLDER_OR_HUB_NAME`), its prompts, and a stopwatch."""

from __future__ import annotations

import argparse
import time
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import lookahead_hf


def load() -> tuple[Any, Any]:
    """Load an enabled model in fp32 and its tokenizer, by default the demo's small model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder or a hub name")
    name = parser.parse_args().model or demo_model()
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float32").eval()
    lookahead_hf.enable(model)
    lookahead_hf.warm_up(model)  # optional: the first calls would otherwise prepare and measure
    return model, tokenizer


def demo_model() -> str:
    """The folder of the demo's model, which is downloaded once."""
    from lookahead_hf.tools.cli.models import ensure_demo_model

    return str(ensure_demo_model())


def ask(tokenizer: Any, *prompts: str) -> Any:
    """Encode prompts for a chat model: `input_ids` and `attention_mask`, [prompts, columns]."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        for prompt in prompts
    ]
    return tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)


def timed(generate: Any, **arguments: Any) -> tuple[Any, float]:
    """Call `generate`; return the output and the seconds that it took."""
    start = time.perf_counter()
    output = generate(**arguments)
    return output, time.perf_counter() - start


def compare(model: Any, plain_seconds: float, seconds: float) -> None:
    """Print the times of a plain and a speculative call, and what speculation did."""
    stats = lookahead_hf.last_stats(model)
    drafted = f"{stats.num_accepted} of {stats.num_drafted} draft tokens accepted"
    gain = f"{plain_seconds / seconds:.1f} times as fast"
    print(f"plain:       {plain_seconds:.2f} s, 1.00 tokens per step")
    print(f"speculative: {seconds:.2f} s, {stats.tokens_per_step:.2f} tokens per step, {drafted}")
    print(f"             {gain}")
