"""transformers' continuous batching: its manager, and what passes through its queues."""

from __future__ import annotations

import threading
from typing import Any

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

from lookahead_hf.compat.forwards import text_config

IS_KNOWN = "_wake_up_loop" in ContinuousBatchingManager.__init__.__code__.co_names
"""Whether the manager is one whose queues and threads ours can inherit; that of 5.17 is not."""


class QueueManager(ContinuousBatchingManager):
    """transformers' manager, whose thread runs `decode` in place of transformers' own steps.

    Its constructor is the `fill` below: that of transformers would change the model's attention.
    """

    def decode(self) -> None:
        """Decode whatever comes, until the manager is stopped."""
        raise NotImplementedError

    def fail_waiting(self, error: Exception) -> None:
        """Give all requests that have not begun an error."""
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
        """End the run with an error that its requests get."""
        self._handle_critical_error(error, None)

    def _run_generation_loop(self) -> None:
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


UNREAD = {"cancel_queue", "continuous_batching_config", "logit_processor"}
"""Attributes of transformers' manager that are read only by its own steps, which ours replace."""


def fill(
    manager: QueueManager, model: Any, generation_config: Any, requests: Any, router: OutputRouter
) -> None:
    """Give a manager all attributes that the methods of transformers' manager read."""
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
