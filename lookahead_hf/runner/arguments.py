"""Arguments of a forward: what changes from step to step, and what a trace has frozen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from lookahead_hf.runner.standing import NUMBERS_AND_TEXTS

Shape = tuple[Any, ...]
"""What a program depends on beside the width: rows, names of the inputs, fixed arguments."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A forward's keyword arguments, those that change from step to step by name.

    Attributes:
        given: Tensors and the cache; those of a dict with its name before theirs.
        shape: What a program for them depends on.
    """

    given: dict[str, Any]
    shape: Shape

    @classmethod
    def of(cls, model_inputs: dict[str, Any], num_rows: int) -> Arguments | None:
        """Tell the arguments of a forward apart; None where one is an object of any other kind."""
        given: dict[str, Any] = {}
        fixed = []
        for name, value in model_inputs.items():
            if isinstance(value, torch.Tensor) or name == "past_key_values":
                given[name] = value
            elif isinstance(value, dict) and value and _are_tensors(value.values()):
                given |= {f"{name}.{kind}": mask for kind, mask in value.items()}
            elif _is_plain(value):
                fixed.append((name, repr(value)))
            else:
                return None
        return cls(given, (num_rows, tuple(given), tuple(fixed)))

    @property
    def width(self) -> int:
        """Tokens per row."""
        return int(self.given["input_ids"].shape[1])


def _are_tensors(values: Iterable[Any]) -> bool:
    return all(isinstance(value, torch.Tensor) for value in values)


def _is_plain(value: Any) -> bool:
    """Whether `repr` says all that there is to know of a value."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in NUMBERS_AND_TEXTS
