"""What is kept of a model's recorded steps between calls."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from lookahead_hf.runner.arguments import Shape
from lookahead_hf.runner.packed_linear import PackedWeights
from lookahead_hf.runner.program import Program, compiled
from lookahead_hf.runner.tracing import Trace


class Recordings:
    """The traces of one model in one state of it, and what was made of them.

    Attributes:
        key: The state.
        lock: Held by the call that traces or packs.
        traces: Traced forwards by what they depend on.
        batch_sizes: Numbers of rows that were traced.
        programs: What was written of traces, for the weights themselves or for packed ones.
        num_checked: Steps of each kind that were run both ways.
        gives_more: Whether the model's outputs hold more than logits and the cache.
        refusal: Why the model itself is run, None if it need not be.
        packed: Its packed weights.
        packs: Whether packing is still to be tried.
        lacks_memory: Whether that was put off for want of memory.
    """

    def __init__(self, key: Any) -> None:
        self.key = key
        self.lock = threading.Lock()
        self.traces: dict[Shape, Trace] = {}
        self.batch_sizes: set[int] = set()
        self.programs: dict[tuple[Shape, PackedWeights | None], Program] = {}
        self.num_checked: Counter[Any] = Counter()
        self.gives_more = False
        self.refusal: str | None = None
        self.packed: PackedWeights | None = None
        self.packs, self.lacks_memory = True, False

    def program(self, shape: Shape, packed: PackedWeights | None) -> Program | None:
        """The program for such arguments, written when it is first asked for."""
        found = self.programs.get((shape, packed))
        trace = self.traces.get(shape)
        if found is None and trace is not None:
            found = compiled(trace, None if packed is None else packed.linears)
            self.programs[shape, packed] = found
        return found

    def may_pack(self, asked: str | bool) -> bool:
        """Whether packing was not tried, nor put off by calls that did not insist on it.

        Args:
            asked: As `packed_weights` in `SpeculativeConfig`.
        """
        return self.packs and asked is not False and (asked is True or not self.lacks_memory)

    def refuse(self, reason: str) -> None:
        """Run the model itself from now on."""
        self.refusal = reason
        self.traces, self.programs, self.packed, self.batch_sizes = {}, {}, None, set()

    def unpack(self) -> None:
        """Forget packed weights and what was written for them; they may be packed again."""
        self.packed, self.packs, self.lacks_memory = None, True, False
        self.programs = {key: each for key, each in self.programs.items() if key[1] is None}
