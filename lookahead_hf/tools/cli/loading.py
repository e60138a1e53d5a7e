"""Loads the models of a command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lookahead_hf.ngram_pool import compilation
from lookahead_hf.ngram_pool.compilation import Functions
from lookahead_hf.tools.cli.parsing import Arguments
from lookahead_hf.tools.cli.real_model import ensure_demo_model
from lookahead_hf.tools.cli.screen import CommandError, Screen

NAMES = "takes a folder that save_pretrained wrote, or OWNER/NAME of the Hugging Face hub."
"""What `--model`, `--assistant` and `--tokenizer` take."""

LOADING_SECONDS = 2.0
"""Longest time in which functions of a group are loaded."""

ABOUT_SECONDS = {"drafting": 13, "common": 2, "bfloat16": 5, "float32": 5, "float16": 5}
"""What each group takes to compile on a current core."""

HUB_TIMEOUT = 5.0
"""Seconds in which the hub has to answer."""


def open_model(
    arguments: Arguments, screen: Screen, warms_up: bool = True, drafts: bool = True
) -> tuple[Any, Any]:
    """Load the model that `model_options` name, and its tokenizer; enable it and warm it up.

    A command that writes one text only waits for compiled functions, if it drafts. CommandError if
    the model or the device cannot be used.
    """
    import torch

    import lookahead_hf
    from lookahead_hf.runner.host import groups_of

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    model, tokenizer = load(model_name(arguments, screen), "--model", arguments, screen)
    if drafts:
        wait_for_functions(screen, groups_of(model))
    lookahead_hf.enable(model)
    if warms_up:
        warm_up(screen, model)
    return model, tokenizer


def wait_for_functions(screen: Screen, groups: Sequence[Functions]) -> None:
    """Wait for compiled functions, and show that where it takes more than loading them."""
    compilation.request(groups, is_awaited=True)
    missing = [each for each in groups if not each.ready(LOADING_SECONDS) and each.is_available()]
    if missing:
        about = sum(ABOUT_SECONDS[each.name] for each in missing)
        label = "compiling kernels, once per installation"
        with screen.task(label, about, unit="seconds") as report:
            compilation.wait(missing, show=lambda passed: report(int(passed)))


def warm_up(screen: Screen, model: Any) -> None:
    import lookahead_hf
    from lookahead_hf.warmup import SECONDS

    with screen.task(f"warming up: compiling and measuring, at most {SECONDS:g} s"):
        lookahead_hf.warm_up(model, progress=False)


def model_name(arguments: Arguments, screen: Screen) -> str:
    """Return the model that `--model` names, or the folder of the demo's."""
    return str(ensure_demo_model(screen)) if arguments.model is None else arguments.model


def load(name: str, option: str, arguments: Arguments, screen: Screen) -> tuple[Any, Any]:
    """Load a model and its tokenizer; `option` is the option that names them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    dtype, device = arguments.dtype, arguments.device
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device).item()  # which "meta" does not have
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise CommandError(f"--device {device} cannot be used here, take cpu: {reason}") from error
    logging.disable_progress_bar()
    with screen.task(f"loading {name} in {dtype}"):
        source = {"local_files_only": not reaches_hub(name)}
        with _explained(name, option, "the tokenizer of "):
            tokenizer = AutoTokenizer.from_pretrained(name, **source)
        with _explained(name, option):
            loaded = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **source)
            return loaded.to(device).eval(), tokenizer


def load_tokenizer(name: str, option: str) -> Any:
    from transformers import AutoTokenizer

    with _explained(name, option, "the tokenizer of "):
        return AutoTokenizer.from_pretrained(name, local_files_only=not reaches_hub(name))


def reaches_hub(name: str) -> bool:
    """Return whether the hub can be asked for a model; if not, its cache is all there is.

    This asks once. transformers asks for each file again and again, for 40 seconds and more.
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
    """Check that a model is on this machine or that the hub can be asked; CommandError if not."""
    from transformers import AutoConfig

    if not reaches_hub(name):
        with _explained(name, option):
            AutoConfig.from_pretrained(name, local_files_only=True)


@contextmanager
def _explained(name: str, option: str, part: str = "") -> Iterator[None]:
    """Turn whatever loading raises into one sentence that says what to do."""
    try:
        yield
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
    """Return whether torch raised `error` because a device or the host has no memory left."""
    import torch

    # For the host's memory, torch raises a RuntimeError that only its message tells apart.
    is_host = "can't allocate memory" in str(error)
    return is_host or isinstance(error, (MemoryError, torch.OutOfMemoryError))
