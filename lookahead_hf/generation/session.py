"""The session of a call: its steps, and how its cache and output end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from lookahead_hf import stats
from lookahead_hf.call.emitter import ColumnStream, RequestedOutputs
from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.session import DraftSession
from lookahead_hf.fallback import Unserved
from lookahead_hf.generation.recorder import StatsRecorder, Tracer
from lookahead_hf.model import compat
from lookahead_hf.rows import Rows
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.outputs import StepOutputs
from lookahead_hf.runner.prefill import prefill
from lookahead_hf.runner.processes import Processes
from lookahead_hf.verification.walk import Verifier


def finish_cache(session: BatchSession, columns: int) -> Any:
    """Leave everything as plain does after so many columns; return the cache if it is shown."""
    returned, processes = session.call.returns_cache, session.processes
    vocab = compat.text_config(session.call.model).vocab_size
    raises = not 0 <= (session.call.pad or 0) < vocab  # as plain does where it feeds such a pad
    if returned or session.outputs or processes.runs_same or raises:
        _catch_up(session, columns)
    while processes.others_go_on():
        rows = session.rows
        last = [[rows.last_token(row)] for row in range(rows.num_rows)]
        session.runner.feed(last, rows.num_emitted - 1)  # of which nothing is kept
    return session.runner.hand_back(columns - 1) if returned else None


def break_off(session: BatchSession) -> None:
    """Hand back a cache of the caller's after an exception.

    It holds whole steps only and ends where the slowest row ends; a later call feeds the rest.
    """
    try:
        if session.call.returns_cache and session.runner.beginning is not None:
            session.runner.hand_back(int(session.runner.fed.min()))
    finally:
        session.processes.broke_off()


def observe_outputs(session: BatchSession, row: int, kept: list[int], step: StepOutputs) -> None:
    """Keep the requested outputs of the tokens that a row keeps, by their places, root first."""
    if session.outputs.observes:
        session.outputs.observe(row, kept, step.of_model)


def _catch_up(session: BatchSession, columns: int) -> None:
    """Feed finished rows the pads that plain feeds them until the last row ends."""
    rows, runner = session.rows, session.runner
    lacking = np.where(rows.finished, np.maximum(columns - rows.num_emitted, 0), 0)  # [rows]
    if not lacking.any():
        return
    session.processes.step()
    pads = [
        [rows.last_token(row), *[session.call.pad or 0] * (count - 1)][:count]
        for row, count in enumerate(lacking.tolist())
    ]
    outputs = runner.feed(pads, np.minimum(rows.num_emitted - 1, columns - 2))
    runner.keep(lacking)
    for row in np.flatnonzero(lacking).tolist():
        observe_outputs(session, row, list(range(lacking[row])), outputs)
        for index in range(lacking[row]):
            session.verifier.feed_pad(rows, row, outputs.logits[row, index])


@dataclass(frozen=True, slots=True)
class Session(ABC):
    """The parts of the loop. It is entered before the first forward and left after the last one."""

    rows: Rows
    drafts: DraftSession
    runner: Runner
    verifier: Verifier
    processes: Processes
    stats: StatsRecorder

    @abstractmethod
    def start(self, stack: ExitStack) -> None:
        """Read the prompts that are there, and set the model up until the stack ends."""

    def goes_on(self) -> bool:
        """Return whether another step follows; a queue first gives free rows to other texts."""
        return bool(self.rows.live.any())

    def launch(self, draft: DraftTree) -> tuple[DraftTree, Any]:
        """Run a step; if memory runs out, run it without the draft and draft less from then on."""
        try:
            return draft, self._launch(draft)
        except torch.OutOfMemoryError:
            has_state = self.runner.recurrent is not None  # which may be half a step further
            if not draft.num_nodes or has_state or not self.processes.is_alone:
                raise
        self.drafts.narrow(draft.max_nodes // 2)
        return DraftTree.empty(self.rows.num_rows), self.runner.launch_again(self.rows)

    def _launch(self, draft: DraftTree) -> Any:
        return self.runner.launch(self.rows, draft)

    def repeat_if_not_finite(self, draft: DraftTree, step: Any) -> tuple[DraftTree, Any]:
        """Run a step again without its draft if the draft made NaN of a row's logits."""
        with self.stats.phase("forward"):
            if not self.runner.check_for_nan(step, self.rows.live):
                return draft, step
            self.processes.step()
            step = self.runner.repeat_without_draft(self.rows)
        self.drafts.spoiled(step)
        return DraftTree.empty(self.rows.num_rows), step

    def observe(self, draft: DraftTree, step: Any, verdict: Verdict) -> None:
        """Learn from a committed step: statistics and drafting."""
        self.stats.observe(draft, verdict)
        with self.stats.phase("draft"):
            self.drafts.observe(
                self.rows,
                draft,
                verdict,
                step.logits,
                self.stats.step_seconds if self.runner.step_is_typical else None,
            )

    @abstractmethod
    def output(self) -> Any:
        """Return the output once all texts have ended."""

    def __enter__(self) -> Session:
        return self

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class BatchSession(Session):
    """A static batch: one call of `generate`, whose rows all begin together.

    Only a static batch has plain's columns, and so a streamer and outputs by column, noise by row
    and decoding step, lockstep, and a cache that is handed back.
    """

    call: PreparedCall
    stream: ColumnStream
    outputs: RequestedOutputs
    tracer: Tracer | None

    def start(self, stack: ExitStack) -> None:
        call = self.call
        shown = compat.LAST_HIDDEN_STATES if self.drafts.reads_hidden_states else {}
        try:
            with self.stats.phase("prefill"):
                outputs = prefill(
                    self.runner,
                    call,
                    lambda: stack.enter_context(compat.set_up_for_decoding(call.model)),
                    shown,
                )
        except (torch.OutOfMemoryError, Unserved):
            raise  # plain generation may follow, which streams the prompt itself
        except BaseException:
            self.stream.prompt(call.input_ids)  # plain generation does so before it reads it
            raise
        self.stream.prompt(call.input_ids)
        self.outputs.prefill(outputs)
        if shown:
            self.rows.prompt_states = compat.last_hidden_states(outputs)
        self.processes.step()
        with self.stats.phase("verify"):
            self.verifier.first(self.rows, outputs.logits[:, -1:])
        with self.stats.phase("draft"):
            self.drafts.begin(self.rows)
        if self.tracer is not None:
            self.tracer.observe_prefill(self.rows)

    def observe(self, draft: DraftTree, step: Any, verdict: Verdict) -> None:
        """Learn from a committed step: requested outputs, statistics, drafting and the trace."""
        for row in np.flatnonzero(verdict.num_emitted).tolist() if self.outputs.observes else ():
            observe_outputs(self, row, [0, *(verdict.accepted(row) + 1).tolist()], step)
        Session.observe(self, draft, step, verdict)
        if self.tracer is not None:
            self.tracer.observe(draft, verdict)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        with ExitStack() as stack:
            stack.callback(self.drafts.end, self.rows)
            stack.callback(self.runner.end)
            if kind is not None:
                stack.callback(break_off, self)
            stack.callback(self.verifier.end, self.rows)

    def output(self) -> Any:
        """Hand the cache back, end the stream and return what `generate` returns."""
        call, emitted = self.call, self.rows.num_emitted
        per_source = self.drafts.source_stats()
        record = self.stats.finish(
            self.rows,
            engine=self.verifier.name,
            per_source=per_source,
            num_undrafted=int(self.drafts.num_undrafted.sum()),
            **self.runner.ways,
            trace=None if self.tracer is None else self.tracer.finish(self.rows, list(per_source)),
            num_fed=self.runner.num_fed,
        )
        # Without a pad token only the columns that the shortest row has.
        columns = int(emitted.min() if call.pad is None else emitted.max())
        cache = finish_cache(self, columns)
        stats.publish(call.model, record)  # before the end, when a reader may ask for it
        self.stream.end()
        sequences = self._sequences(columns)
        if not call.generation_config.return_dict_in_generate:
            return sequences
        has_encoder = call.model.config.is_encoder_decoder
        kind = GenerateEncoderDecoderOutput if has_encoder else GenerateDecoderOnlyOutput
        fields = self.outputs.fields(columns)
        output = kind(sequences=sequences, **{compat.GENERATE_CACHE: cache}, **fields)
        output.speculative_stats = record
        return output

    def _sequences(self, columns: int) -> torch.Tensor:
        """Prompt and generated columns, [rows, columns] int64, finished rows padded."""
        columns += self.rows.prompt_columns
        out = np.full((self.rows.num_rows, columns), self.call.pad or 0, np.int64)
        for row in range(self.rows.num_rows):
            ids = self.rows.ids(row)[:columns]  # of the prompt too, which a processor may edit
            out[row, : len(ids)] = ids
        return torch.from_numpy(out).to(self.call.input_ids.device)
