"""Which engine verifies a call, decided before its first token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lookahead_hf.distributed.coordinator import Alone
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.generation.outputs import Records
from lookahead_hf.generation.streaming import ColumnStream
from lookahead_hf.logits.row_processors import RowProcessors
from lookahead_hf.rows import Rows
from lookahead_hf.runner.cuda.runner import Scores, Scoring
from lookahead_hf.verification import batched_walk, device
from lookahead_hf.verification.batched_walk import Waves
from lookahead_hf.verification.follower import ToldLockstep, ToldWalk
from lookahead_hf.verification.lockstep import Lockstep
from lookahead_hf.verification.noise import Noise, NoiseInOrder
from lookahead_hf.verification.rejection import Rejection
from lookahead_hf.verification.rng import same_as_multinomial
from lookahead_hf.verification.stopping import RowStopping
from lookahead_hf.verification.walk import Rules, Walk


class Engine:
    """Verifies a call: row by row where its rules can be asked so, else in lockstep."""

    def __init__(
        self,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        input_ids: torch.Tensor,  # [rows, columns]
        pad: int | None,
        records: Records,
        stream: ColumnStream,
        verification: str = "exact",
        on_device: bool = False,
        processes: Alone | None = None,
    ) -> None:
        """Take over a call's processors and criteria as `generate` prepared them.

        `on_device`: whether model and tensors are on one device that can walk by itself;
        `processes`: who decides, None where this process does by itself.
        """
        self._together = processes or Alone()
        num_rows, columns = input_ids.shape
        self._given = (logits_processor, stopping_criteria)
        self._processors = RowProcessors(logits_processor, num_rows, columns)
        self._stopping = RowStopping(stopping_criteria, num_rows)
        self._do_sample = bool(generation_config.do_sample)
        self._device, self._pad = input_ids.device, pad
        self._records, self._stream = records, stream
        self._decider: Walk | Lockstep | None = None
        # Unknown classes may draw random numbers themselves: then every draw keeps plain's order.
        known = self._processors.all_known and self._stopping.all_known
        replayed = not self._do_sample or same_as_multinomial(self._device)
        self._in_order = num_rows == 1 and not (known and replayed)
        apart = not (self._processors.unserved() or self._stopping.unserved())
        apart &= replayed or num_rows == 1
        rejects = verification == Rejection.name and self._do_sample
        decider = Rejection if rejects else Walk
        self.name = decider.name if apart else Lockstep.name
        on_device &= decider is Walk and apart and replayed and device.admits(logits_processor)
        on_device &= self._stopping.by_token_and_length and not records
        if on_device and not self._in_order:
            self.name = device.Device.name

    @contextmanager
    def sampling(self, rows: Rows, logits: torch.Tensor) -> Iterator[None]:
        """Hold the call's noise; afterwards the default generator stands where plain leaves it.

        Args:
            rows: The call's rows.
            logits: Logits after the prompt, [rows, 1, vocab].
        """
        if self.name == Lockstep.name:
            # One draw per step, in plain's order: the default generator itself serves.
            self._decider = self._in_lockstep()
            yield
        elif self.name == Rejection.name:
            self._decider = Rejection(self._rules(None))
            yield
        elif not self._do_sample:
            self._decider = self._walk(None)
            yield
        else:
            shape = rows.num_rows, logits.shape[-1]
            with NoiseInOrder() if self._in_order else Noise(*shape, self._device) as noise:
                self._decider = self._walk(noise)
                try:
                    yield
                finally:
                    noise.finish(self.num_decided(rows))

    def num_decided(self, rows: Rows) -> int:
        """Columns that plain would have chosen by now, the one included that is being shown."""
        return self._stream.num_begun if self._stream.is_heard else rows.num_columns

    def _walk(self, noise: Noise | NoiseInOrder | None) -> Walk:
        if self.name == device.Device.name:
            return device.Device(self._rules(noise), self._given[0])
        if self._together.told is not None:
            return ToldWalk(self._rules(noise), self._together.told)
        kind = Waves if batched_walk.pays(self._device, self._processors.num_rows) else Walk
        return kind(self._rules(noise))

    def _in_lockstep(self) -> Lockstep:
        given = *self._given, self._do_sample, self._pad, self._device, self._records, self._stream
        if self._together.told is not None:
            return ToldLockstep(*given, told=self._together.told)
        return Lockstep(*given)

    def _rules(self, noise: Noise | NoiseInOrder | None) -> Rules:
        asked = self._processors, self._stopping
        return Rules(*asked, noise, self._records, self._device, self._stream)

    def complete(self, rows: Rows, draft: DraftTree) -> DraftTree:
        """Add to a draft what verification needs beside it."""
        return draft if isinstance(self._decider, Walk) else self._lockstep.complete(rows, draft)

    @property
    def _lockstep(self) -> Lockstep:
        assert isinstance(self._decider, Lockstep)
        return self._decider

    def first(self, rows: Rows, logits: torch.Tensor) -> Verdict:
        """Emit the token after the prompt: logits [rows, 1, vocab]."""
        return self._verified(rows, DraftTree.empty(rows.num_rows), logits)

    def verify(self, rows: Rows, draft: DraftTree, outputs: Any) -> Verdict:
        """Decide one step and emit its tokens; see `Walk.verify`.

        Args:
            rows: The texts.
            draft: What was fed behind the last tokens.
            outputs: What the target's forward returned.
        """
        assert self._decider is not None
        if isinstance(self._decider, device.Device):
            return self._decider.read(rows, draft, outputs)
        return self._verified(rows, draft, outputs.logits)

    def _verified(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        assert self._decider is not None
        self._together.ready()
        verdict = self._decider.verify(rows, draft, logits)
        self._together.decided(rows, verdict)
        return verdict

    @property
    def scoring(self) -> Scoring | None:
        """What alters the logits of a step on the device; None where nothing does."""
        alters = self._do_sample or not self._processors.empty
        return self._scores if self.name == device.Device.name and alters else None

    def _scores(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Scores:
        assert isinstance(self._decider, device.Device)
        return self._decider.scores(rows, draft, logits)

    def feed_pad(self, rows: Rows, row: int, logits: torch.Tensor) -> None:
        """Feed a finished row one more pad, as plain does until the last row ends.

        Args:
            rows: The call's rows.
            row: The finished row.
            logits: The target's after its newest token, [vocab].
        """
        assert isinstance(self._decider, Walk)
        if self._records.chooses:
            self._decider.score(rows, row, logits)
        rows.emit(row, self._pad or 0)
