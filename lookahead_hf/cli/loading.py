"""Load the model of a command and write its prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lookahead_hf.cli.real_model import ensure_demo_model
from lookahead_hf.cli.screen import CommandError, Screen


def open_model(name: str | None, dtype: str, screen: Screen) -> tuple[Any, Any]:
    """A model that is enabled and warmed up, on the GPU where there is one, and its tokenizer.

    Args:
        name: A folder or a name of the Hugging Face hub; None takes the demo's model.
        dtype: A torch dtype by name, "float32" or "bfloat16".
        screen: Where progress is shown.

    Raises:
        CommandError: The model cannot be loaded.
    """
    import torch
    from transformers.utils import logging

    import lookahead_hf

    logging.disable_progress_bar()
    folder = name or str(ensure_demo_model(screen))
    with screen.task(f"loading {folder} in {dtype}"):
        model, tokenizer = _load(folder, getattr(torch, dtype))
        model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    lookahead_hf.enable(model)
    with screen.task("warming up: compiling (once per installation) and measuring"):
        lookahead_hf.warm_up(model)
    return model, tokenizer


def _load(folder: str, dtype: Any) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), tokenizer
    except Exception as error:  # whatever a damaged file or a missing package makes of it
        if is_out_of_memory(error):
            raise
        raise CommandError(
            f"The model {folder!r} could not be loaded: {type(error).__name__}: {error}\n"
            "--model takes a folder that save_pretrained wrote, or OWNER/NAME of the Hugging Face "
            "hub."
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is how torch says that a device or the host has no memory left."""
    import torch

    # Of the host's memory it says so by words only.
    is_host = "can't allocate memory" in str(error)
    return is_host or isinstance(error, (MemoryError, torch.OutOfMemoryError))


@contextmanager
def within_positions(model: Any, columns: int, new_tokens: int) -> Iterator[None]:
    """Let a text that outgrows a model's table of positions be one message.

    Args:
        model: What generates.
        columns: Tokens of the prompt.
        new_tokens: Most tokens that are to follow.
    """
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if most is None or columns + new_tokens <= most or is_out_of_memory(error):
            raise
        raise CommandError(
            f"This model knows {most} positions, and {columns} tokens of the prompt and up to "
            f"{new_tokens} new ones are more. Take a shorter prompt or fewer --new-tokens."
        ) from error


def use_threads(count: int | None) -> None:
    """Give torch this many threads; None leaves its choice."""
    import torch

    if count is not None:
        torch.set_num_threads(count)


def encode_chat(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> dict[str, Any]:
    """What `generate` takes for a conversation: ids and mask [1, columns], and the pad token."""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    else:
        text = "\n\n".join(message["content"] for message in messages)
        inputs = tokenizer(text, return_tensors="pt")
    chosen = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return {**chosen, "pad_token_id": pad}
