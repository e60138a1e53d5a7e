"""`lookahead-hf env`: what a bug report needs to say about a machine."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from lookahead_hf.cli.parsing import Arguments, command
from lookahead_hf.cli.real_model import demo_model_folder
from lookahead_hf.cli.screen import Screen

_PACKAGES = (
    "lookahead-hf",
    "torch",
    "transformers",
    "triton",
    "numba",
    "numpy",
    "accelerate",
    "peft",
    "safetensors",
    "gguf",
)
_VARIABLES = ("LOOKAHEAD_HF_", "TRITON_", "NUMBA_", "CUDA_VISIBLE", "OMP_NUM", "XDG_CACHE")
_EXAMPLES = """\
examples:
  lookahead-hf env
  lookahead-hf env --json > environment.json
"""


def run(arguments: Arguments, screen: Screen) -> int:
    """Print the report."""
    found = collect()
    screen.result(found)
    for title, entries in found.items():
        screen.line(title, "bold")
        for name, value in entries.items():
            screen.line(f"  {name}: {value}")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """The report by section."""
    return {
        "versions": versions(),
        "devices": _devices(),
        "caches": _caches(),
        "environment variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
        },
        "reasons for plain generation": _fallback_reasons(),
    }


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
    """What a reader needs to judge speeds that were measured with a model."""
    import torch

    gpu = torch.cuda.get_device_name() if model.device.type == "cuda" else None
    return {
        "device": gpu or cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": Path(model.config.name_or_path).name,
        "parameters": model.num_parameters(),
        **{name: versions()[name] for name in ("torch", "transformers", "lookahead-hf")},
    }


def cpu_name() -> str:
    """The processor's name, on Linux as the kernel knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _caches() -> dict[str, Any]:
    folder = demo_model_folder()
    return {
        "demo model": str(folder) if folder.is_dir() else f"not fetched (would be {folder})",
        "compiled numba functions": _compiled_functions(),
    }


def _compiled_functions() -> str:
    places = {Path(sys.modules["lookahead_hf"].__path__[0])}
    places |= {Path(os.environ[name]) for name in ("NUMBA_CACHE_DIR",) if os.environ.get(name)}
    files = [file for place in places for file in place.rglob("*.nbi")]
    return f"{len(files)} below {', '.join(map(str, sorted(places)))}"


def _fallback_reasons() -> dict[str, str]:
    from lookahead_hf.fallback import FallbackReason

    return {
        reason.value: f"{reason.text} ({reason.fix})" if reason.fix else reason.text
        for reason in FallbackReason
    }


COMMAND = command(
    "env",
    run,
    help="print what a bug report needs",
    about="Prints versions, devices, caches and why a call may run plainly.",
    examples=_EXAMPLES,
)
