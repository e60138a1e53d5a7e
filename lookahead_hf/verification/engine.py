"""Which engine verifies a call, decided before its first token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lookahead_hf.fallback import FallbackReason, Unserved
from lookahead_hf.logits.walkers import RowProcessors
from lookahead_hf.rows import Rows
from lookahead_hf.steps import DraftTree, Verdict
from lookahead_hf.verification.noise import Noise
from lookahead_hf.verification.stopping import RowStopping
from lookahead_hf.verification.walk import Rules, Walk


class Engine:
    """Verifies the steps of one call.

    Attributes:
        name: Named in the statistics.
    """

    name = Walk.name

    def __init__(
        self,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        input_ids: torch.Tensor,  # [rows, columns]
    ) -> None:
        """Raises Unserved where a processor or criterion cannot be asked row by row."""
        num_rows, columns = input_ids.shape
        self._processors = RowProcessors(logits_processor, num_rows, columns)
        self._stopping = RowStopping(stopping_criteria, num_rows)
        self._do_sample = bool(generation_config.do_sample)
        self._device = input_ids.device
        if name := self._processors.unserved():
            raise Unserved(FallbackReason.PROCESSOR, name)
        if name := self._stopping.unserved():
            raise Unserved(FallbackReason.STOPPING, name)

    @contextmanager
    def sampling(self, rows: Rows, logits: torch.Tensor) -> Iterator[None]:
        """Hold the call's noise; afterwards the default generator stands where plain leaves it.

        Args:
            rows: The call's rows.
            logits: Logits after the prompt, [rows, 1, vocab].
        """
        if not self._do_sample:
            self._walk = Walk(Rules(self._processors, self._stopping, None, self._device))
            yield
            return
        with Noise(rows.num_rows, logits.shape[-1], self._device) as noise:
            self._walk = Walk(Rules(self._processors, self._stopping, noise, self._device))
            try:
                yield
            finally:
                noise.finish(int(rows.num_emitted.max()))

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        """Decide one step and emit its tokens; see `Walk.verify`."""
        return self._walk.verify(rows, draft, logits)
