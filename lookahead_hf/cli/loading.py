"""Load the model of a command and encode its prompts."""

from __future__ import annotations

import json
from typing import Any

from lookahead_hf.cli.real_model import ensure_demo_model
from lookahead_hf.cli.screen import CommandError, Screen

NAMES = "takes a folder that save_pretrained wrote, or OWNER/NAME of the Hugging Face hub."
"""What `--model` and `--tokenizer` take."""


def open_model(
    name: str | None, dtype: str, screen: Screen, threads: int | None = None
) -> tuple[Any, Any]:
    """Load a model and its tokenizer; enable the model and warm it up, on a GPU if there is one.

    Args:
        name: A folder or a name of the Hugging Face hub; None takes the demo's model.
        dtype: A torch dtype by name, "float32" or "bfloat16".
        screen: Where progress is shown.
        threads: Torch's threads; None leaves the number to torch.

    Raises:
        CommandError: The model cannot be loaded.
    """
    import torch
    from transformers.utils import logging

    import lookahead_hf

    if threads is not None:
        torch.set_num_threads(threads)
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
    except Exception as error:  # a damaged file or a missing package may raise anything
        if is_out_of_memory(error):
            raise
        raise CommandError(
            f"The model {folder!r} could not be loaded: {type(error).__name__}: {error}\n"
            f"--model {NAMES}"
        ) from error


def load_tokenizer(name: str, option: str) -> Any:
    """Load a tokenizer alone.

    Args:
        name: A folder or a name of the Hugging Face hub.
        option: The option that takes the name, for the message.

    Raises:
        CommandError: The tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise CommandError(
            f"The tokenizer {name!r} could not be loaded: {error}\n{option} {NAMES}"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch raised `error` because a device or the host has no memory left."""
    import torch

    # For the host's memory, torch raises a RuntimeError that only its message tells apart.
    is_host = "can't allocate memory" in str(error)
    return is_host or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def encode_chat(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Encode a conversation for `generate`: ids and mask, [1, columns], and the pad token."""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    else:
        text = "\n\n".join(message["content"] for message in messages)
        inputs = tokenizer(text, return_tensors="pt")
    chosen = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return {**chosen, "pad_token_id": pad}


def text_of(record: str | bytes, field: str, where: str) -> str:
    """Return a field of a JSON record.

    Args:
        record: The JSON text of an object.
        field: The field's name; dots lead into nested objects.
        where: The record's place, for messages.

    Raises:
        ValueError: The record is not JSON, or it has no such field with a text.
    """
    try:
        value = json.loads(record)
    except ValueError as error:
        raise ValueError(f"{where}: this is not JSON ({error})") from error
    for name in field.split("."):
        if not isinstance(value, dict) or name not in value:
            known = ", ".join(value) if isinstance(value, dict) else f"a {type(value).__name__}"
            raise ValueError(f"{where}: no field {name!r} but {known}; --field names another")
        value = value[name]
    if not isinstance(value, str):
        raise ValueError(f"{where}: the field {field!r} is not a text; --field names another")
    return value
