"""`lookahead-hf env` and `compile`: what a bug report needs, and what is compiled beforehand."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lookahead_hf.tools.cli.models import demo_model_folder, wait_for_functions
from lookahead_hf.tools.cli.options import command, dtype_option
from lookahead_hf.tools.cli.screen import CommandError, Screen

_PACKAGES = ("lookahead-hf", "torch", "transformers", "triton", "numba", "numpy", "accelerate",
             "peft", "safetensors", "gguf")  # fmt: skip
_VARIABLES = ("LOOKAHEAD_HF", "TRITON_", "NUMBA_", "CUDA_VISIBLE", "OMP_NUM", "XDG_CACHE")


@command(
    "env",
    """\
examples:
  lookahead-hf env
  lookahead-hf env --json > environment.json
""",
)
def ENV(arguments: SimpleNamespace, screen: Screen) -> None:
    """Print what a bug report needs: versions, devices, variables, and where the demo's model is.

    The exit code is 1 if nothing is speculated with the installed transformers.
    """
    import torch

    from lookahead_hf.fallback import FallbackReason, Unserved

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    variables = {name: os.environ[name] for name in os.environ if name.startswith(_VARIABLES)}
    folder = demo_model_folder()
    found = {
        **versions(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "gpus": ", ".join(names) or "none",
        "cuda or hip": torch.version.cuda or torch.version.hip or "none",
        "demo model": str(folder) if folder.is_dir() else f"not fetched (would be {folder})",
        **variables,
    }
    screen.result(found)
    for name, value in found.items():
        screen.line(f"{name}: {value}")
    try:
        from lookahead_hf.call.admission import check_version

        check_version()
    except (ImportError, Unserved) as error:
        why = error if isinstance(error, Unserved) else Unserved(FallbackReason.VERSION, str(error))
        raise CommandError(f"No call is speculated: {why}") from error


@command(
    "compile",
    """\
examples:
  lookahead-hf compile
  lookahead-hf compile --dtype bfloat16
  NUMBA_CACHE_DIR=/opt/compiled lookahead-hf compile
""",
)
@dtype_option(
    multiple=True, default=["bfloat16", "float32"], help="of the models; may be given several times"
)
def COMPILE(arguments: SimpleNamespace, screen: Screen) -> None:
    """Compile what speculation needs, once per installation.

    Otherwise another process compiles it beside the first calls, which decode plainly. The code is
    kept beside the package or, if that folder is read-only, in the user's cache folder.
    """
    import torch

    # These say what there is to compile.
    import lookahead_hf.drafting.registry  # noqa: F401
    from lookahead_hf.engines.cpu.kernels.program import groups_of
    from lookahead_hf.ngram_pool import compilation

    groups = [*groups_of(getattr(torch, each) for each in arguments.dtype), compilation.drafting]
    start = time.monotonic()
    wait_for_functions(screen, groups)
    for each in groups:
        each.check_available()
    seconds = time.monotonic() - start
    screen.result({"groups": [each.name for each in groups], "seconds": seconds})
    screen.note(f"everything is compiled ({seconds:.0f} s)")


def versions() -> dict[str, str]:
    """Return the versions of Python, the system and the packages that matter."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


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
