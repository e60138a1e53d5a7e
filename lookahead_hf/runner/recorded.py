"""Steps on the CPU without the model's Python: a forward is traced once and then repeated.

What is repeated are the calls of torch's functions that the model made, on the same weights, so
that the bits are the same. Of a step of 135 million parameters the model's own Python takes a tenth
on two cores, and laying out half-precision weights for a block another fifth (`packing`).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lookahead_hf.cache.slots import SlotCache
from lookahead_hf.runner import attention, packed_linear
from lookahead_hf.runner.arguments import Arguments, Shape
from lookahead_hf.runner.guards import fingerprint
from lookahead_hf.runner.module_hooks import with_hooks
from lookahead_hf.runner.packed_linear import PackedWeights
from lookahead_hf.runner.program import Group, Program, generalized, groups_of, key_of
from lookahead_hf.runner.recordings import Recordings
from lookahead_hf.runner.standing import Standing, refusal, settings
from lookahead_hf.runner.tracing import Trace, Tracer, Untraceable

_logger = logging.getLogger(__name__)

TRACED_AFTER = 24
"""Steps of a model, with as many rows, after which "auto" traces: that costs a few steps."""

PACKED_AFTER = 96
"""Steps of a model after which "auto" packs its weights: that takes as long as twenty steps."""

TRACED_WIDTHS = (2, 5)
"""Tokens per row of the first forwards from which one for any number is made."""

WIDEST_TRACED = 65
"""Tokens per row of the last of them, which tells whether wide blocks go another way."""

MOST_TRACED = 128
"""Tokens of all rows in that one, where there are many rows."""

MOST_BATCH_SIZES = 16
"""Numbers of rows that a model is traced for; each takes a megabyte for a model of 30 layers."""

CHECKS = 2
"""Steps of a kind that are run both ways before the trace is trusted with it."""

MODES = "recorded", "packed"

CHANGED = "the model was changed during the call"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a call asks for, as in `SpeculativeConfig`."""

    recorded: str | bool = "auto"
    packed: str | bool = "auto"


_lock = threading.Lock()
_kept: WeakKeyDictionary[Any, Recordings] = WeakKeyDictionary()
_num_steps: WeakKeyDictionary[Any, Counter[int]] = WeakKeyDictionary()


def release(model: Any) -> None:
    """Free what is kept for a model."""
    with _lock:
        _kept.pop(model, None)
        _num_steps.pop(model, None)


class RecordedSteps:
    """The steps of one call."""

    def __init__(self, model: Any, num_rows: int, wanted: Wanted) -> None:
        """Go on from what is kept of the model, if that is still true of it."""
        self._model, self._num_rows, self._wanted = model, num_rows, wanted
        self._kept: Recordings | None = None
        self._standing: Standing | None = None
        self._refusal: str | None = None
        self._is_written = False  # what was packed
        self._ran = ""  # the mode of the latest step that was repeated, or why none is
        with _lock:
            self._num_steps = _num_steps.setdefault(model, Counter())
            is_known = model in _kept
        if is_known:
            self._enter()

    def _enter(self) -> None:
        """Look the model over; what was kept of another state of it is forgotten."""
        self._refusal = refusal(self._model)
        if self._refusal is not None:
            return
        # A forward that uses other tensors than parameters and buffers cannot be traced.
        key = fingerprint(self._model), settings(self._model, tensors=False)
        with _lock:
            found = _kept.get(self._model)
            if found is not None and found.key != key:
                self._num_steps.clear()  # two adapters in turn would be traced in every call
            if found is None or found.key != key:
                found = _kept[self._model] = Recordings(key)
        if found.packed is not None and not found.packed.is_current():
            with found.lock:
                found.unpack()
        self._kept, self._standing = found, Standing(self._model)

    @property
    def _widest(self) -> int:
        """Tokens per row of the widest block that was traced."""
        fewest = TRACED_WIDTHS[-1] + 1
        return max(fewest, min(WIDEST_TRACED, MOST_TRACED // self._num_rows))

    @property
    def _packed(self) -> PackedWeights | None:
        kept, asked = self._kept, self._wanted.packed
        return None if kept is None or asked is False or self._is_written else kept.packed

    @property
    def _ready(self) -> str:
        """The mode in which steps can be repeated, "" where they were not traced."""
        if self._kept is None or self._num_rows not in self._kept.batch_sizes:
            return ""
        return MODES[0] if self._packed is None else MODES[1]

    @property
    def mode(self) -> str:
        """How steps are run now: "recorded", "packed", or "" where the model itself is run."""
        return self._ready if not self._ran or self._ran in MODES else ""

    @property
    def state(self) -> str:
        """How steps were run, as in `mode`, or why by the model itself."""
        kept = self._kept
        refused = self._refusal if kept is None else kept.refusal
        return refused or self._ran or "too few steps to record"

    def prepare(
        self, rehearse: Callable[[int], dict[str, Any]], slots: SlotCache, at_once: bool = False
    ) -> None:
        """Trace and pack where it is time to.

        Args:
            rehearse: Lays out a block of so many tokens; the forward's arguments.
            slots: The cache that blocks are laid out in.
            at_once: Whether it is time now, in any case.
        """
        rows, steps = self._num_rows, self._num_steps
        due = at_once or self._wanted.recorded is True or steps[rows] >= TRACED_AFTER
        if self._kept is None and self._refusal is None and due:
            self._enter()
        kept = self._kept
        if kept is None or kept.refusal is not None or not kept.lock.acquire(blocking=False):
            return
        try:
            due = due and len(kept.batch_sizes) < MOST_BATCH_SIZES
            # What a call has changed belongs to another key than the one it entered by.
            if due and rows not in kept.batch_sizes and self._is_as_before():
                self._trace_all(rehearse, slots)
            due = at_once or self._wanted.packed is True or steps.total() >= PACKED_AFTER
            if due and kept.traces and kept.may_pack(self._wanted.packed):
                self._pack()
        except Exception as error:  # whatever it is, the model itself still runs
            reason = str(error) if isinstance(error, Untraceable) else _first_line(error)
            _logger.info("steps of %s are not recorded: %s", type(self._model).__name__, reason)
            kept.refuse(reason)
        finally:
            kept.lock.release()

    def _trace_all(self, rehearse: Callable[[int], dict[str, Any]], slots: SlotCache) -> None:
        """Trace a step of any number of tokens, and one of a single token without a mask."""
        assert self._kept is not None
        widths = (*TRACED_WIDTHS, self._widest)
        (shape, *_), traces = zip(*(self._traced(rehearse, n, slots) for n in widths), strict=True)
        self._kept.traces[shape] = generalized(traces, widths)
        try:
            shape, single = self._traced(rehearse, 1, slots)
        except Untraceable as error:  # some models look at the tokens where they get no mask
            _logger.debug("steps of one token are not recorded: %s", error)
        else:
            self._kept.traces.setdefault(shape, single)
        self._kept.batch_sizes.add(self._num_rows)

    def _traced(
        self, rehearse: Callable[[int], dict[str, Any]], width: int, slots: SlotCache
    ) -> tuple[Shape, Trace]:
        with slots.rehearsal(width):
            model_inputs = rehearse(width)
            arguments = Arguments.of(model_inputs, self._num_rows)
            if arguments is None:
                raise Untraceable("an argument of the forward is an object")
            tracer = Tracer(self._model, arguments.given)
            with attention.step(noting=tracer.opaque), _updates_noted(slots.layers, tracer), tracer:
                outputs = self._model.forward(**model_inputs, return_dict=True)
        assert self._kept is not None
        self._kept.gives_more |= not set(outputs) <= {"logits", "past_key_values"}
        return arguments.shape, tracer.trace(outputs.logits)

    def _pack(self) -> None:
        """Pack the weights, once and for all: what does not gain by it now never will."""
        kept = self._kept
        assert kept is not None
        groups: dict[Any, Group] = {}
        for trace in kept.traces.values():
            groups |= {key_of(group): group for group in groups_of(trace)}
        if self._wanted.packed is not True and not packed_linear.fits(groups.values()):
            kept.lacks_memory = True
            return
        kept.packs = False
        try:
            weights = PackedWeights(groups.values())
        except (RuntimeError, MemoryError) as error:  # out of memory, which torch tells as both
            _logger.info("weights are not packed: %s", _first_line(error))
            return
        if weights.linears:
            kept.packed = weights

    def run(
        self,
        model_inputs: dict[str, Any],
        layers: list[Any],
        slots: int,
        forward: Callable[[], Any],
    ) -> Any:
        """Repeat the forward, or run it where it was not traced.

        Args:
            model_inputs: The forward's arguments.
            layers: The cache's layers.
            slots: Slots that the attention sees.
            forward: Runs the model.

        Returns:
            The model's outputs, of a repeated forward the logits alone.
        """
        self._num_steps[self._num_rows] += 1
        kept = self._kept
        if kept is None or not self._ready:
            return forward()
        if self._packed is not None and self._packed.is_written():
            self._is_written = True  # a later call packs them anew
        arguments, packed = Arguments.of(model_inputs, self._num_rows), self._packed
        program = None if arguments is None else kept.program(arguments.shape, packed)
        reason = self._why_not(program)
        if reason is None:
            self._ran = self._ready
        elif reason is CHANGED or not self._ran:
            self._ran = reason
        if reason is not None or arguments is None or program is None:
            return forward()
        alone = arguments.width if not 1 < arguments.width <= self._widest else 0
        kind = arguments.shape, packed is not None, alone, slots.bit_length()
        step: Callable[[], torch.Tensor | None]
        step = partial(self._repeated, program, arguments, layers)
        if kept.num_checked[kind] < CHECKS:
            exact = packed is None or packed.same_bits
            step = partial(self._checked, kind, step, model_inputs, exact)
        return with_hooks(self._model, model_inputs, step)

    def _why_not(self, program: Program | None) -> str | None:
        """Why the model itself has to run a step; None if a program can."""
        if not self._is_as_before():
            return CHANGED
        if self._kept is not None and self._kept.gives_more and self._model._forward_hooks:
            return "hooks around the model are given more than logits"
        return "such steps were not recorded" if program is None else None

    def _is_as_before(self) -> bool:
        """Whether the model is what it was when this call looked it over."""
        return self._standing is not None and self._standing.is_current()

    def _checked(
        self,
        kind: Any,
        repeat: Callable[[], torch.Tensor | None],
        model_inputs: dict[str, Any],
        exact: bool,
    ) -> torch.Tensor:
        """The model's own logits, compared with those of the repeated forward."""
        kept, again = self._kept, repeat()
        # Last, since it leaves its K and V in the cache.
        own: torch.Tensor = self._model.forward(**model_inputs, return_dict=True).logits
        if again is not None:
            assert kept is not None
            if _agree(again, own, exact):
                kept.num_checked[kind] += 1
            else:
                kept.refuse("repeating a step gave other logits")
        return own

    def _repeated(
        self, program: Program, arguments: Arguments, layers: list[Any]
    ) -> torch.Tensor | None:
        try:
            return program.run(arguments.width, layers, *arguments.given.values())
        except Exception as error:
            assert self._kept is not None
            self._kept.refuse(_first_line(error))
            return None


@contextmanager
def _updates_noted(layers: list[Any], tracer: Tracer) -> Iterator[None]:
    """Note what the cache's layers do as calls of those layers, whichever a later call has."""
    try:
        for index, layer in enumerate(layers):
            layer.update = tracer.opaque(layer.update, index)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("update", None)


def _agree(again: torch.Tensor, own: torch.Tensor, exact: bool) -> bool:
    """Whether a repeated step gave the model's logits, or is as near as rounding permits."""
    slack = 0.0 if exact else 1e-4 * float(own.nan_to_num().abs().max())
    return torch.allclose(again, own, rtol=0.0, atol=slack, equal_nan=True)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
