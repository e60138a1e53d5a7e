"""`lookahead-hf env`: the facts about a machine that a bug report needs."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from lookahead_hf.tools.cli.parsing import Arguments, command
from lookahead_hf.tools.cli.real_model import demo_model_folder
from lookahead_hf.tools.cli.screen import CommandError, Screen

_PACKAGES = ("lookahead-hf", "torch", "transformers", "triton", "numba", "numpy", "accelerate",
             "peft", "safetensors", "gguf")  # fmt: skip
_VARIABLES = ("LOOKAHEAD_HF", "TRITON_", "NUMBA_", "CUDA_VISIBLE", "OMP_NUM", "XDG_CACHE")
_EXAMPLES = """\
examples:
  lookahead-hf env
  lookahead-hf env --json > environment.json
"""


@command("env", _EXAMPLES)
def COMMAND(arguments: Arguments, screen: Screen) -> None:
    """Print what a bug report needs.

    The report has versions, devices, caches, and every reason for which a call runs plain generate.
    """
    found = collect()
    screen.result(found)
    for title, entries in found.items():
        screen.line(title, "bold")
        for name, value in entries.items():
            screen.line(f"  {name}: {value}")
    if found["versions"]["tested"] != YES:
        raise CommandError(found["versions"]["tested"])


def collect() -> dict[str, dict[str, Any]]:
    from lookahead_hf.fallback import FallbackReason

    return {
        "reasons for plain generation": {
            reason.value: f"{reason.text} ({reason.fix})" for reason in FallbackReason
        },
        "environment variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
        },
        "caches": _caches(),
        "devices": _devices(),
        "versions": {**versions(), "tested": _tested()},  # last, where a terminal shows them
    }


YES = "yes"


def _tested() -> str:
    """Return whether speculation works with the installed transformers, or what to do if not."""
    from lookahead_hf.fallback import FallbackReason, Unserved

    try:
        from lookahead_hf.call.admission import check_version

        check_version()
    except ImportError as error:
        return f"No call is speculated: {Unserved(FallbackReason.VERSION, str(error))}"
    except Unserved as unserved:
        return f"No call is speculated: {unserved}"
    return YES


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _devices() -> dict[str, Any]:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "gpus": ", ".join(names) or "none",
        "cuda or hip": torch.version.cuda or torch.version.hip or "none",
    }


def machine(model: Any) -> dict[str, Any]:
    """Return the facts that a reader needs to judge speeds measured with a model."""
    import torch

    installed = versions()
    gpu = torch.cuda.get_device_name() if model.device.type == "cuda" else None
    return {
        "device": gpu or cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": Path(model.config.name_or_path).name,
        "parameters": model.num_parameters(),
        **{name: installed[name] for name in ("torch", "transformers", "lookahead-hf")},
    }


def cpu_name() -> str:
    """Return the processor's name; on Linux, the kernel's name for it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _caches() -> dict[str, Any]:
    folder = demo_model_folder()
    places = [os.environ.get("NUMBA_CACHE_DIR"), sys.modules["lookahead_hf"].__path__[0]]
    roots = sorted({Path(place) for place in places if place})
    files = [file for root in roots for file in root.rglob("*.nbi")]
    return {
        "demo model": str(folder) if folder.is_dir() else f"not fetched (would be {folder})",
        "compiled numba functions": f"{len(files)} below {', '.join(map(str, roots))}",
    }
