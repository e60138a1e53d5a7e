"""Time attention's prefix and `topk_rows` by the settings of their kernels.

Those of today come first; one with other results, or without room, is a line that says so.

    python benchmarks/sweep.py --nodes 0,15,63 --context 4096 --json sweep.json
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from kernel_cases import Bench, Case
from kernels import Line, each_place, on_backend, timed
from lines import Report

from lookahead_hf.kernels import _common, attention, topk
from lookahead_hf.kernels._common import launch

SETTINGS: dict[str, list[dict[str, int]]] = {
    "attention": [
        {},
        *({"num_warps": w, "num_stages": s} for w, s in product((2, 4, 8), (2, 3, 4))),
        *({"QUERIES": queries} for queries in (16, 32, 128)),
        *({"KEYS": keys} for keys in (32, 128)),
    ],
    "topk": [{}, *({"num_warps": w, "PART": p} for w, p in product((4, 8, 16), (128, 256, 512)))],
}
"""What replaces the settings of today, by the function of `Bench` that makes the case."""


def sweep(report: Report, bench: Bench, line: Line, _: float) -> None:
    """Add a line for every setting of every kernel, those of today first."""
    for kind in bench.options.only or SETTINGS:
        case = getattr(bench, kind)()
        with on_backend("triton"):
            expected = _tensors(case.ours(0))
            for setting in SETTINGS[kind]:
                said = ", ".join(f"{name}={value}" for name, value in setting.items())
                named = replace(line, name=f"{case.name} {said or 'as it is'}", ran="kernel")
                report.add(named, partial(_timed, bench, kind, case, setting, expected))


def _timed(
    bench: Bench, kind: str, case: Case, setting: dict[str, int], expected: list[torch.Tensor]
) -> dict[str, Any]:
    with tuned(kind, setting):
        torch.testing.assert_close(_tensors(case.ours(0)), expected)
        return timed(bench, case, "graph" if bench.device.type == "cuda" else "call")


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [result.values, result.ids]


@contextmanager
def tuned(kind: str, setting: dict[str, int]) -> Iterator[None]:
    """Launch the kernel of attention's prefix or of the k best with other settings."""
    kernels = {"attention": attention._prefix_kernel, "topk": topk._topk_kernel}
    sizes, part = attention.tile_sizes, setting.get("PART", _common.PART)
    options = {name: setting[name] for name in setting if name.startswith("num_")}
    tile = {name: setting[name] for name in ("QUERIES", "KEYS") if name in setting}

    def launched(which: Any, *given: Any, **own: Any) -> None:
        launch(which, *given, **(own | options if which is kernels[kind] else own))

    with (
        patch.object(attention, "launch", launched),
        patch.object(topk, "launch", launched),
        patch.object(attention, "tile_sizes", lambda *given: sizes(*given) | tile),
        patch.object(topk, "PART", part),
        patch.object(_common, "PART", part),
    ):
        yield


if __name__ == "__main__":
    each_place(sweep, may_fail=True)
