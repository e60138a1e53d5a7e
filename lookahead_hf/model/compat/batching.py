"""transformers' continuous batching: its manager and the objects in its queues."""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch
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

from lookahead_hf.model.compat.forwards import text_config

IS_KNOWN = "_wake_up_loop" in ContinuousBatchingManager.__init__.__code__.co_names
"""Whether our manager can inherit queues and threads from it; it cannot from that of 5.17."""


class QueueManager(ContinuousBatchingManager):
    """transformers' manager, whose thread runs `decode` instead of transformers' steps.

    `fill` replaces its constructor, which would change the model's attention.
    """

    def decode(self) -> None:
        """Decode requests until the manager is stopped."""
        raise NotImplementedError

    def fail_waiting(self, error: Exception) -> None:
        """Fail all requests that have not begun."""
        raise NotImplementedError

    @property
    def thread(self) -> Any:
        """The thread of the run, None before it starts."""
        return self._generation_thread

    @thread.setter
    def thread(self, thread: Any) -> None:
        self._generation_thread = thread

    def wake(self) -> None:
        """End the `sleep` of a thread that has nothing to do."""
        self._wake_up_loop.set()

    def sleep(self, seconds: float) -> None:
        """Wait until `wake` is called, at most so long."""
        self._wake_up_loop.wait(seconds)
        self._wake_up_loop.clear()

    def end_with(self, error: Exception) -> None:
        """End the run and fail its requests."""
        self._handle_critical_error(error, None)

    def _run_generation_loop(self, use_inference_mode: bool = False) -> None:
        with torch.inference_mode(use_inference_mode):
            self.decode()

    def _fail_all_remaining_requests(self, error: Exception, batch_processor: Any) -> None:
        self.fail_waiting(error)


def bytes_per_token(model: Any) -> int:
    """Return the bytes that K and V of a token take at most, from the configuration of a model."""
    config = text_config(model)
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = kv_heads if isinstance(kv_heads, int) else heads
    return int(2 * config.num_hidden_layers * kv_heads * dim * model.dtype.itemsize)


def fill(
    manager: QueueManager,
    model: Any,
    generation_config: Any,
    requests: Any,
    router: OutputRouter,
    config: Any = None,
) -> None:
    """Set all attributes of a manager that transformers' constructor sets, but its processors."""
    manager.cancel_queue, manager.continuous_batching_config = queue.Queue(), config
    manager.input_queue, manager.output_router = requests, router
    manager._request_counter, manager._request_lock = 0, threading.Lock()
    manager._wake_up_loop = threading.Event()
    manager.background_thread_status = BackgroundThreadStatus()
    manager.batch_processor = manager._generation_thread = manager._original_attn_impl = None
    manager.warmed_up = manager._use_prefix_sharing = False
    manager.model, manager.generation_config = model, generation_config
    manager.num_return_sequences = generation_config.num_return_sequences or 1
    manager.distributed_helper, manager.is_tp_driver = DistributedHelper(None, None), True


def lock_of(router: OutputRouter) -> threading.Lock:
    """Return the lock that a router holds while it reads its handlers."""
    return router._lock
