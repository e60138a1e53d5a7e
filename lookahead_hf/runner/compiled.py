"""Runs a model whose forward is compiled: few shapes of blocks, so that little is compiled."""

from __future__ import annotations

from typing import Any

from lookahead_hf.cache.adopt import AdoptedCache
from lookahead_hf.draft import DraftTree
from lookahead_hf.rows import Rows
from lookahead_hf.runner.host import BlockShape, Runner
from lookahead_hf.runner.layout import BlockInputs
from lookahead_hf.runner.torch_compile import make_room, width_for


class CompiledRunner(Runner):
    """A runner on the host whose blocks have one of a few shapes."""

    cache: AdoptedCache  # after the prefill

    def __init__(self, model: Any, num_rows: int) -> None:
        super().__init__(model, num_rows, BlockShape(1, 0))

    def layout(self, rows: Rows, draft: DraftTree) -> BlockInputs:
        width = width_for(1 + draft.max_nodes)
        self._shape = BlockShape(width, 0)
        make_room(self.cache.slots, self.cache.slots.longest + width)
        return super().layout(rows, draft)
