"""Chooses the engine that runs the steps of a call: that of its device, else the model's own code.

An engine is a module of `optional.MODULES`, by the name of the device. It has a function `runner`,
which takes `StepOptions` and returns a `Runner` of its own, or None for a call that it does not
serve. A runner's contract is `begin`, `launch`, `commit`, `hand_back` and `end`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lookahead_hf.block.layout import BlockShape
from lookahead_hf.call import execution, optional
from lookahead_hf.ngram_pool import compilation
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.outputs import Scoring


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What a call asks of its steps.

    Attributes:
        model: The target.
        num_rows: Rows of the batch.
        num_new: Most new tokens of a row.
        takes_flat: Returns whether blocks may be flat, given whether kernels read prompts.
        shape: The shape of every block, None to fit each draft.
        compiled_layers: As in `SpeculativeConfig`, and so is `cuda_graphs`.
        is_alone: Whether no other process runs parts of the forwards.
        observes: Whether the call reads further outputs of the forwards.
        decides: Whether the device is to choose the tokens.
        scoring: What it makes of the logits to choose by, None to choose the likeliest tokens.
    """

    model: Any
    num_rows: int
    num_new: int
    takes_flat: Callable[[bool], bool]
    shape: BlockShape | None = None
    compiled_layers: bool | str = True
    cuda_graphs: bool | str = "auto"
    is_alone: bool = True
    observes: bool = False
    decides: bool = True
    scoring: Scoring | None = None


def choose(name: str, options: StepOptions) -> Runner:
    """Return the runner of a call, from the engine of that name if it serves the call."""
    engine = optional.find(name)
    misses_engine = engine is None and name in optional.MODULES
    runner: Runner | None = None if engine is None else engine.runner(options)
    if runner is None:
        is_flat = options.takes_flat(False)
        runner = Runner(options.model, options.num_rows, options.shape, flat=is_flat)
        runner.own_code = (execution.NO_ENGINE,) if misses_engine else ()
    return runner


def groups_of(model: Any) -> list[compilation.Functions]:
    """Return the compiled functions that calls on a model need, in the order of need."""
    engine = optional.find("cpu") if model.device.type == "cpu" else None
    return [compilation.drafting] if engine is None else engine.groups_of(model)
