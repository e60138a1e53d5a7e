"""Measured costs of steps, kept on disk for the next process that loads the same model."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from lookahead_hf.drafting.control.cost_model import KeptCurve
from lookahead_hf.utils.files import cache_root, replacing

logger = logging.getLogger(__name__)


def file_of(model: Any) -> Path | None:
    """Return the file for a model, None for one that was not loaded from a folder or the hub.

    Its name is a hash of all that changes the cost of a step: the model and its configuration, its
    dtype, the device, torch's threads, and the versions.
    """
    config, on_gpu = model.config, model.device.type == "cuda"
    if not config.name_or_path:
        return None
    ours = sys.modules["lookahead_hf"].__version__
    facts = {
        "model": [type(model).__name__, config.name_or_path, config.to_dict()],
        "dtype": str(model.dtype),
        "device": torch.cuda.get_device_name(model.device) if on_gpu else model.device.type,
        "cpu": [torch.backends.cpu.get_cpu_capability(), os.cpu_count(), torch.get_num_threads()],
        "versions": [ours, transformers.__version__, torch.__version__],
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return cache_root() / "costs" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def read(file: Path | None) -> list[KeptCurve]:
    """Return the curves in a file; none if it is missing or damaged."""
    if file is None:
        return []
    try:
        return [KeptCurve.from_json(each) for each in json.loads(file.read_text())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.info("costs in %s are not read: %r", file, error)
        return []


def write(file: Path, curves: Sequence[KeptCurve], most_files: int = 64) -> None:
    """Replace a file by one with these curves, atomically; log errors of the file system.

    Files of `most_files` models are kept; the one written longest ago goes first.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as opened:
            opened.write(json.dumps(curves).encode())
        kept = sorted(file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
        for oldest in kept[:-most_files]:
            oldest.unlink(missing_ok=True)
    except OSError as error:
        logger.info("costs are not kept in %s: %r", file, error)
