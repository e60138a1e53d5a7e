"""A session whose rows come and go, and the time that each of them took."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.session import DraftSession, Limits
from lookahead_hf.engines.cuda.runner import CudaRunner, OnDevice, OnHost
from lookahead_hf.fallback import Unserved, report
from lookahead_hf.generation.decode import build_drafters, run
from lookahead_hf.generation.recorder import StatsRecorder
from lookahead_hf.generation.session import Session
from lookahead_hf.logits.constraints import find_constraint
from lookahead_hf.model import compat
from lookahead_hf.model.compat.generation import RequestStatus
from lookahead_hf.queue.request import KeptScores, QueuedRequest, write_alone
from lookahead_hf.queue.scheduler import Engine, Prompts
from lookahead_hf.rows import Rows
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.processes import Processes
from lookahead_hf.stats import SpeculativeStats
from lookahead_hf.trace import PARTS
from lookahead_hf.verification.walk import Walk

if TYPE_CHECKING:
    from lookahead_hf.logits.grammars import Grammar


class RowTimes:
    """Time and fed tokens of the text in each row, which add up to the time and tokens of the run.

    What a step takes is shared equally by the texts in progress. If several of them share a prompt,
    the one that read it is charged for it.
    """

    def __init__(self, recorder: StatsRecorder, runner: Runner) -> None:
        self._recorder, self._runner = recorder, runner
        self._spent = np.zeros((runner.num_rows, len(PARTS)))
        self._shared = np.zeros(len(PARTS))  # what of the recorder's times is in `_spent`
        self._fed_before = np.zeros(runner.num_rows, np.int64)

    def share(self, rows: Iterable[int]) -> None:
        """Share what was spent since the last time among rows."""
        rows, total = [*rows], np.array([self._recorder.milliseconds[name] for name in PARTS])
        self._spent[rows] += (total - self._shared) / len(rows)
        self._shared = total

    def read_alone(self, row: int, num_tokens: int) -> None:
        """Count the tokens of a prompt that was read outside of steps."""
        self._fed_before[row] -= num_tokens

    def of_row(self, row: int) -> dict[str, Any]:
        """Return the arguments of `StatsRecorder.of_row` that are known here."""
        milliseconds = dict(zip(PARTS, self._spent[row].tolist(), strict=True))
        num_fed = int(self._runner.step_tokens[row] - self._fed_before[row])
        return {"milliseconds": milliseconds, "num_fed": num_fed}

    def free(self, row: int) -> None:
        """Begin to count another text in a row."""
        self._spent[row], self._fed_before[row] = 0, self._runner.step_tokens[row]


STOPPED = "the run was stopped before this request was complete"
"""The error of a request that a hard stop gives up."""


@dataclass(frozen=True, slots=True)
class QueueSession(Session):
    """Decodes requests together; whenever a text ends, the next request takes its row."""

    verifier: Walk
    prompts: Prompts  # what the rows hold of prompts
    times: RowTimes  # the share of each request in the time of the run
    jobs: dict[int, QueuedRequest]  # the requests in progress by row
    most_new: np.ndarray  # most tokens that the text of each row may have, [rows] int64
    engine: Engine  # where requests come from and results go
    # What `generate` sets up for steps, undone while prompts are read alone
    setup: ExitStack = field(default_factory=ExitStack)

    def start(self, stack: ExitStack) -> None:
        stack.enter_context(self.setup)
        if self.runner.is_packed and self.engine.max_batch_tokens is not None:
            # Only a prompt shows the layout of the cache, and the first one may be too long.
            self.prompts.take(0, self.engine.builder.trial(), self._set_up)
            self.prompts.forget([0])

    def goes_on(self) -> bool:
        """Pass on what the rows have become, and give free rows to the requests that wait."""
        if self.engine.pauses():
            self.prompts.renew()
        for row, job in list(self.jobs.items()):
            if job.is_cancelled:
                self._free(row)
        for row, job in list(self.jobs.items()):
            self._pass_on(row, job)
        self._fill()
        if self.engine.stops() or not self.jobs:
            return False
        with self.stats.phase("draft"):
            self.drafts.begin(self.rows)
        return True

    def _launch(self, draft: DraftTree) -> Any:
        if isinstance(self.runner, CudaRunner):
            on_device = self.verifier.takes_likeliest(self.rows)
            self.runner.decision = OnDevice() if on_device else OnHost()
        return self.prompts.launch(self.rows, draft)

    def observe(self, draft: DraftTree, step: Any, verdict: Verdict) -> None:
        Session.observe(self, draft, step, verdict)
        self.times.share(self.jobs)

    def _fill(self) -> None:
        """Give free rows to the requests that wait."""
        rows = (row for row in range(self.rows.num_rows) if row not in self.jobs)
        free = sorted(rows, key=self.prompts.holds)
        while free and not self.engine.stops():
            job = self.engine.take()
            if job is None:
                break
            holder = self.prompts.holder(job.state.initial_tokens)
            row = holder if holder in free else free[0]
            free.remove(row)
            job.state.status = RequestStatus.PREFILLING
            self.jobs[row] = job
            self._advance(row, job)
            if row not in self.jobs:  # its text has ended at once
                free.append(row)
        self.prompts.forget(free)

    def _advance(self, row: int, job: QueuedRequest) -> None:
        """Go on with the prompt of a request; if that fails, the request alone fails."""
        try:
            with self.stats.phase("prefill"):
                self._prefill(row, job)
        except Unserved as unserved:
            self._vacate(row)
            self.setup.close()
            # Plain `generate` writes a text that cannot be decoded together with others.
            self.engine.beside(partial(_write, self.engine, job, unserved))
            self._set_up()
        except Exception as error:
            self._fail(row, job, error)
        else:
            if job.state.status is RequestStatus.DECODING:
                with self.stats.phase("draft"):
                    self.drafts.begin_row(self.rows, row)
                self.times.share([row])
                self._pass_on(row, job)

    def _prefill(self, row: int, job: QueuedRequest) -> None:
        """Let a row decode once its prompt was read, which may take several steps."""
        if job.call is None:
            builder = self.engine.builder
            job.num_top = builder.num_top(job)
            job.call = builder.call(job)
            job.constraint = find_constraint(job.call.processors, 1)
            job.rules = builder.rules(job.call, job.seed, job.num_top is not None)
            self.runner.make_room(int(job.call.generation_config.max_length))
        ids = job.call.input_ids[0].cpu().numpy()
        logits = self._after_prompt(row, job.call, ids)
        if logits is None:
            return
        assert job.rules is not None
        job.state.status = RequestStatus.DECODING
        self.rows.take(row, ids)
        self.most_new[row] = job.call.num_draftable
        self.verifier.take(self.rows, row, job.rules, logits)

    def _after_prompt(self, row: int, call: PreparedCall, ids: np.ndarray) -> torch.Tensor | None:
        """Return logits after a prompt, [tokens], as [vocab]; None while it is being read."""
        prompts = self.prompts
        holder = prompts.holder(ids)
        if holder is not None:
            return prompts.share(row, holder)
        if prompts.is_reading(ids):
            return None
        if prompts.reads_in_chunks(ids, bool(self.rows.live.any())):
            prompts.read(row, ids)
            return None
        self.setup.close()
        self.times.read_alone(row, len(ids))
        return prompts.take(row, call, self._set_up)

    def _set_up(self) -> None:
        self.setup.enter_context(compat.set_up_for_decoding(self.engine.builder.model))

    def _pass_on(self, row: int, job: QueuedRequest) -> None:
        """Pass on the tokens of the latest step, and free the row if its text has ended."""
        state, known = job.state, len(job.state.generated_tokens)
        if state.status is RequestStatus.PREFILLING:
            self._advance(row, job)
            return
        if row in self.verifier.errors:
            self._fail(row, job, self.verifier.errors[row])
            return
        emitted = self.rows.emitted(row)
        new = emitted[known:].tolist()
        state.generated_tokens += new
        outputs = self.verifier.rules_of(row).emitter.outputs
        if isinstance(outputs, KeptScores):
            job.log_probs.add(job.num_top or 0, outputs.take(), new)
        job.note_tokens(len(new))
        if self.rows.finished[row]:
            state.generated_tokens = emitted.tolist()  # a processor may have edited earlier ones
            with self.stats.phase("draft"):
                self.drafts.end_row(self.rows, row)
            self.times.share([row])
            record = self.stats.of_row(
                self.rows,
                row,
                **self.times.of_row(row),
                engine=self.verifier.name,
                per_source=self.drafts.source_stats(row),
                num_undrafted=int(self.drafts.num_undrafted[row]),
                **self.runner.ways,
            )
            state.status = RequestStatus.FINISHED
            self.engine.deliver(job, record)
            self._free(row)
        elif state.streaming and new:
            self.engine.deliver(job)

    def _fail(self, row: int, job: QueuedRequest, error: BaseException) -> None:
        job.error = error
        self.engine.fail(job, error)
        self._free(row)

    def _free(self, row: int) -> None:
        self.engine.release(self._vacate(row))

    def _vacate(self, row: int) -> QueuedRequest:
        self.most_new[row] = 0
        self.prompts.reading.pop(row, None)
        for part in (self.rows, self.verifier, self.stats, self.times):
            part.free(row)
        return self.jobs.pop(row)

    def output(self) -> None:
        """Nothing: texts are passed on as they end."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: object) -> None:
        self.runner.end()
        self.drafts.end(self.rows)
        for row, job in list(self.jobs.items()):
            self.engine.fail(job, error or RuntimeError(STOPPED))
            self._free(row)


def _write(engine: Engine, job: QueuedRequest, unserved: Unserved) -> None:
    """Write the text of a request by plain `generate`."""
    builder, state = engine.builder, job.state

    def on_token() -> bool:
        job.note_tokens(1)
        return job.is_cancelled or engine.stops()

    try:
        report(builder.model, unserved, builder.request.config.on_fallback)
        if job.num_top is not None:
            raise ValueError(f"a text that is written alone ({unserved.reason}) has no logprobs")
        tokens = write_alone(builder.model, builder.settings(job), job.seed, on_token)
        if engine.stops():
            raise RuntimeError(STOPPED)
    except Exception as error:
        job.error = error
        engine.fail(job, error)
    else:
        state.generated_tokens, state.status = tokens, RequestStatus.FINISHED
        if state.timestamps is not None:
            del state.timestamps[len(tokens) :]  # beams may go on after the best has ended
        engine.deliver(job, SpeculativeStats(fallback_reason=unserved.reason))
    finally:
        engine.release(job)


def decode(engine: Engine) -> None:
    """Decode until no request waits, or the run stops."""
    with torch.no_grad():
        while engine.waiting and not engine.stops():
            run(new_session(engine))


def new_session(engine: Engine) -> QueueSession:
    """Return a session with free rows only; ValueError if an option or a pool is wrong."""
    builder, num_rows = engine.builder, engine.max_slots
    model, request = builder.model, builder.request
    do_sample = bool(builder.generation_config.do_sample)
    rows, most_new = Rows.without_texts(num_rows), np.zeros(num_rows, np.int64)
    jobs: dict[int, QueuedRequest] = {}

    def grammar_of(row: int) -> Grammar | None:
        job = jobs.get(row)
        return None if job is None or job.constraint is None else job.constraint.shadow(0)

    runner = builder.runner(num_rows, engine.max_batch_tokens)
    drafts = DraftSession(
        model,
        request.config,
        rows,
        build_drafters(model, request, num_rows, do_sample, grammar_of=grammar_of),
        Limits(do_sample, int(compat.text_config(model).vocab_size), most_new),
        runner,
    )
    stats = StatsRecorder(num_rows)
    return QueueSession(
        rows=rows,
        drafts=drafts,
        runner=runner,
        verifier=Walk(),
        prompts=Prompts(runner, engine.max_batch_tokens),
        processes=Processes(),
        stats=stats,
        times=RowTimes(stats, runner),
        jobs=jobs,
        most_new=most_new,
        engine=engine,
    )
