"""transformers' continuous batching: its manager, and what passes through its queues."""

from __future__ import annotations

from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    DistributedHelper,
    OutputRouter,
)
from transformers.generation.continuous_batching.requests import (
    GenerationOutput,
    RequestState,
    RequestStatus,
)

IS_KNOWN = "_wake_up_loop" in ContinuousBatchingManager.__init__.__code__.co_names
"""Whether the manager is one whose queues and threads ours can inherit; that of 5.17 is not."""


def end_with(manager: ContinuousBatchingManager, error: Exception) -> None:
    """End a manager's run with an error that its requests get."""
    manager._handle_critical_error(error, None)
