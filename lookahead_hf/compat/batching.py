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

__all__ = [
    "BackgroundThreadStatus",
    "ContinuousBatchingManager",
    "DistributedHelper",
    "GenerationOutput",
    "OutputRouter",
    "RequestState",
    "RequestStatus",
]
