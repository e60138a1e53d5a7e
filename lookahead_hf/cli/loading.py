"""Load the models of a command and encode its prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lookahead_hf.cli.real_model import ensure_demo_model
from lookahead_hf.cli.screen import CommandError, Screen

NAMES = "takes a folder that save_pretrained wrote, or OWNER/NAME of the Hugging Face hub."
"""What `--model`, `--assistant` and `--tokenizer` take."""

HUB_TIMEOUT = 5.0
"""Seconds in which the hub has to answer."""


def open_model(
    name: str | None,
    dtype: str,
    screen: Screen,
    threads: int | None = None,
    device: str | None = None,
) -> tuple[Any, Any]:
    """Load a model and its tokenizer; enable the model and warm it up.

    Args:
        name: A folder or a name of the Hugging Face hub; None takes the demo's model.
        dtype: A torch dtype by name, "float32" or "bfloat16".
        screen: Where progress is shown.
        threads: Torch's threads; None leaves the number to torch.
        device: A torch device by name; None takes a GPU if there is one.

    Raises:
        CommandError: The model cannot be loaded, or the device cannot be used.
    """
    import torch

    import lookahead_hf

    if threads is not None:
        torch.set_num_threads(threads)
    model, tokenizer = load(name or str(ensure_demo_model(screen)), dtype, screen, device)
    lookahead_hf.enable(model)
    with screen.task("warming up: compiling (once per installation) and measuring"):
        lookahead_hf.warm_up(model)
    return model, tokenizer


def load(
    name: str, dtype: str, screen: Screen, device: str | None = None, option: str = "--model"
) -> tuple[Any, Any]:
    """Load a model and its tokenizer; `option` is the option that names them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise CommandError(f"--device {device} cannot be used here, take cpu: {reason}") from error
    logging.disable_progress_bar()
    with screen.task(f"loading {name} in {dtype}"), _explained(name, option):
        source = {"local_files_only": not reaches_hub(name)}
        with _explained(name, option, "the tokenizer of "):
            tokenizer = AutoTokenizer.from_pretrained(name, **source)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype), **source)
        return model.to(device).eval(), tokenizer


def load_tokenizer(name: str, option: str) -> Any:
    """Load a tokenizer alone; `option` is the option that names it."""
    from transformers import AutoTokenizer

    with _explained(name, option, "the tokenizer of "):
        return AutoTokenizer.from_pretrained(name, local_files_only=not reaches_hub(name))


def reaches_hub(name: str) -> bool:
    """Whether the hub can be asked for a model; where it cannot, its cache is all there is.

    transformers asks it for each file of a model again and again, for 40 seconds and more. This
    asks once, for a name that may be one of the hub.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if Path(name).exists():
        return True
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT)
    except (HfHubHTTPError, HFValidationError):  # an answer, or no name of the hub
        return True
    except Exception:  # of the HTTP library, which differs between versions
        return False
    return True


def check_name(name: str, option: str) -> None:
    """Check that a model is on this machine or that the hub can be asked for it.

    Raises:
        CommandError: It is not, and the hub cannot be reached.
    """
    from transformers import AutoConfig

    if not reaches_hub(name):
        with _explained(name, option):
            AutoConfig.from_pretrained(name, local_files_only=True)


@contextmanager
def _explained(name: str, option: str, part: str = "") -> Iterator[None]:
    """Turn whatever loading raises into one sentence that says what to do."""
    try:
        yield
    except CommandError:
        raise
    except Exception as error:  # a damaged file or a missing package may raise anything
        if is_out_of_memory(error):
            raise
        is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
        if is_path and not Path(name).exists():
            reason = "there is no such folder"
        elif "couldn't connect" in str(error) or "offline mode" in str(error):
            reason = "the Hugging Face hub cannot be reached, and the model is not in its cache"
        else:
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        what = f"{part}{name}" if Path(name).exists() else name
        raise CommandError(f"{what} could not be loaded ({reason}): {option} {NAMES}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch raised `error` because a device or the host has no memory left."""
    import torch

    # For the host's memory, torch raises a RuntimeError that only its message tells apart.
    is_host = "can't allocate memory" in str(error)
    return is_host or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def user(text: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def encode_chat(
    model: Any, tokenizer: Any, *conversations: Sequence[dict[str, str]]
) -> dict[str, Any]:
    """Encode conversations for `generate`: ids and mask, [rows, columns], and the pad token."""
    is_chat = bool(tokenizer.chat_template)
    if is_chat:
        chats = list(conversations)
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    else:
        texts = ["\n\n".join(message["content"] for message in each) for each in conversations]
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    padding = {"padding": True, "padding_side": "left"} if len(texts) > 1 else {}
    inputs = tokenizer(texts, return_tensors="pt", add_special_tokens=not is_chat, **padding)
    chosen = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    return {**chosen, "pad_token_id": tokenizer.pad_token_id}


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
            raise ValueError(f"{where}: no field {name!r}, only {known}; --field names another")
        value = value[name]
    if not isinstance(value, str):
        raise ValueError(f"{where}: the field {field!r} is not a text; --field names another")
    return value
