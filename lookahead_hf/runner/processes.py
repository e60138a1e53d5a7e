"""Says who decodes a call: this process alone, or several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import distributed

from lookahead_hf.call import optional
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.fallback import FallbackReason, Unserved
from lookahead_hf.model import compat
from lookahead_hf.rows import Rows


def is_one_of_several() -> bool:
    """Return whether this process belongs to a group of several."""
    is_in_group = distributed.is_available() and distributed.is_initialized()
    return is_in_group and distributed.get_world_size() > 1


def coordinator(model: Any, synced: bool = False) -> Any:
    """Return the module that coordinates several processes, None if this process is alone.

    The model may say that it is divided, and the caller that all processes run equally many
    forwards (`synced`). Unserved if the module is not installed.
    """
    is_divided = max(compat.num_pipeline(model), compat.num_tensor_parallel(model)) > 1
    if not (synced or is_divided or is_one_of_several()):
        return None
    found = optional.find("processes")
    if found is None:
        raise Unserved(FallbackReason.TENSOR_PARALLEL, "lookahead_hf.distributed is not installed")
    return found


@dataclass(frozen=True, slots=True)
class StepMessage:
    """The verdict of one process on a step, and the draft of the next one."""

    verdict: Verdict
    num_text: np.ndarray  # tokens of each row's text, [rows]
    draft: DraftTree  # without evidence


class Processes:
    """The processes that decode a call; this class is one process that waits for no other."""

    decides = True  # whether this process drafts and decides
    is_alone = True  # whether a forward needs no other process
    runs_same = False  # whether all processes run the same rows, and so the same forwards
    receive: Callable[[], StepMessage] | None = None  # what another process decided

    def step(self) -> None:
        """Tell waiting processes that this one runs a forward."""

    def others_go_on(self) -> bool:
        """Return whether this process must run a forward for others after its texts have ended."""
        return False

    def draft(self, propose: Callable[[], DraftTree]) -> DraftTree:
        """Return the draft of the next step: `propose()` if this process decides."""
        return propose()

    def ready(self) -> None:
        """Note that a step has its logits, so that others wait for a verdict."""

    def decided(self, rows: Rows, verdict: Verdict) -> None:
        """Note the verdict on a step, whose tokens are in `rows`."""

    def broke_off(self) -> None:
        """Tell others that the call failed here."""
