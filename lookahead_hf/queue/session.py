"""A session whose rows come and go, and the time that each of them took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lookahead_hf import fallback
from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.session import DraftSession, Limits
from lookahead_hf.engines.cuda.decision import OnDevice, OnHost
from lookahead_hf.engines.cuda.runner import CudaRunner
from lookahead_hf.fallback import Unserved
from lookahead_hf.generation.assembly import build_drafters
from lookahead_hf.generation.decode import run
from lookahead_hf.generation.recorder import StatsRecorder
from lookahead_hf.generation.session import Session
from lookahead_hf.logits.constraints import find_constraint
from lookahead_hf.model import compat
from lookahead_hf.model.compat.batching import RequestStatus
from lookahead_hf.queue.engine import Engine
from lookahead_hf.queue.prompts import Prompts
from lookahead_hf.queue.request import KeptScores, QueuedRequest, of_prompt
from lookahead_hf.queue.scheduler import Scheduler, write_alone
from lookahead_hf.rows import Rows
from lookahead_hf.runner.processes import Processes
from lookahead_hf.stats import SpeculativeStats
from lookahead_hf.trace.steps import PARTS
from lookahead_hf.verification.walk import Walk

if TYPE_CHECKING:
    from lookahead_hf.logits.grammars import Grammar


_PREFILL, _FORWARD = PARTS.index("prefill"), PARTS.index("forward")


class RowTimes:
    """Time and fed tokens of the text in each row, which add up to those of the run.

    The time of a forward is shared by the tokens that each row feeds, and is prefill for a row that
    reads its prompt. Other times are shared equally among the rows that decode. If several requests
    share a prompt, the one that read it is charged for it.
    """

    def __init__(self, num_rows: int, recorder: StatsRecorder) -> None:
        self._recorder = recorder
        self._spent = np.zeros((num_rows, len(PARTS)))
        self._shared = np.zeros(len(PARTS))  # what of the recorder's times is in `_spent`
        self._fed, self._fed_in_steps = np.zeros((2, num_rows), np.int64)

    @contextmanager
    def phase(self, row: int, name: str) -> Iterator[None]:
        """Time a block as a phase of one row alone."""
        spent_by_all, index = self._recorder.milliseconds, PARTS.index(name)
        before = spent_by_all[name]
        try:
            with self._recorder.phase(name):
                yield
        finally:
            spent = spent_by_all[name] - before
            self._spent[row, index] += spent
            self._shared[index] += spent

    def read_alone(self, row: int, num_tokens: int) -> None:
        """Count the tokens of a prompt that was read outside of steps."""
        self._fed[row] += num_tokens

    def share(self, live: np.ndarray, step_tokens: np.ndarray) -> None:
        """Share what a step took.

        Args:
            live: Rows that decoded in it, [rows] bool.
            step_tokens: Tokens that all steps so far have fed for each row, [rows].
        """
        fed, self._fed_in_steps = step_tokens - self._fed_in_steps, step_tokens.copy()
        self._fed += fed
        total = np.array([self._recorder.milliseconds[name] for name in PARTS])
        spent, self._shared = total - self._shared, total
        by_tokens = fed / fed.sum()
        equally = live / live.sum() if live.any() else by_tokens
        of_forward = by_tokens * spent[_FORWARD]
        spent[_FORWARD] = 0
        self._spent += np.outer(equally, spent)
        self._spent[:, _FORWARD] += np.where(live, of_forward, 0)
        self._spent[:, _PREFILL] += np.where(live, 0, of_forward)

    def of_row(self, row: int) -> dict[str, Any]:
        """Return the arguments of `StatsRecorder.of_row` that are known here."""
        milliseconds = dict(zip(PARTS, self._spent[row].tolist(), strict=True))
        return {"milliseconds": milliseconds, "num_fed": int(self._fed[row])}

    def free(self, row: int) -> None:
        """Begin to count another text in a row."""
        self._spent[row] = self._fed[row] = 0


STOPPED = "the run was stopped before this request was complete"
"""The error of a request that a hard stop gives up."""


@dataclass(frozen=True, slots=True)
class QueueSession(Session):
    """Decodes requests together; whenever a text ends, the next request takes its row.

    Attributes:
        prompts: What the rows hold of prompts.
        times: The share of each request in the time of the run.
        scheduler: The requests in progress, and the prompts that are being read.
        most_new: Most tokens that the text of each row may have, [rows] int64.
        engine: Where requests come from and results go.
        setup: What `generate` sets up for steps, undone while prompts are read alone.
    """

    verifier: Walk
    prompts: Prompts
    times: RowTimes
    scheduler: Scheduler
    most_new: np.ndarray
    engine: Engine
    setup: ExitStack = field(default_factory=ExitStack)

    def start(self, stack: ExitStack) -> None:
        stack.enter_context(self.setup)
        if self.runner.is_flat and self.scheduler.max_batch_tokens is not None:
            # Only a prompt shows the layout of the cache, and the first one may be too long.
            self.prompts.take(0, self.engine.builder.trial(), self._set_up)
            self.prompts.forget([0])

    def goes_on(self) -> bool:
        """Pass on what the rows have become, and give free rows to the requests that wait."""
        if self.engine.pauses():
            self.prompts.renew()
        self._free_cancelled()
        stops = self.engine.stops()
        for row, job in list(self.scheduler.jobs.items()):
            if row not in self.scheduler.alone:
                self._pass_on(row, job)
        if not stops:
            self._fill()
            while (due := self.scheduler.next_alone()) is not None and not self.engine.stops():
                self._alone(due)
                self._fill()
            stops = self.engine.stops()
        if self.engine.progress is not None:
            self.engine.progress.show(int(self.rows.live.sum()))
        if stops or not self.scheduler.jobs:
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
        """Learn from a committed step, and share its time among the requests."""
        Session.observe(self, draft, step, verdict)
        self.times.share(verdict.live, self.runner.step_tokens)

    def _has(self, row: int, job: QueuedRequest) -> bool:
        """Return whether a row is still a request's."""
        return self.scheduler.jobs.get(row) is job

    def _free_cancelled(self) -> None:
        """Free the rows of requests that were cancelled."""
        cancelled = self.engine.cancelled()
        for row, job in list(self.scheduler.jobs.items()):
            if job.is_among(cancelled):
                self._free(row)

    def _fill(self) -> None:
        """Give free rows to the requests that wait."""
        free = sorted(self.scheduler.free_rows, key=self.prompts.holds)
        while free and not self.engine.stops():
            job = self.scheduler.next_job()
            if job is None:
                break
            holder = self.prompts.holder(job.state.initial_tokens)
            row = holder if holder in free else free[0]
            free.remove(row)
            job.state.status = RequestStatus.PREFILLING
            self.scheduler.jobs[row] = job
            self._advance(row, job)
            if row not in self.scheduler.jobs:  # its text has ended at once
                free.append(row)
        self.prompts.forget(free)

    def _advance(self, row: int, job: QueuedRequest) -> None:
        """Go on with the prompt of a request; if that fails, the request alone fails."""
        try:
            with self.times.phase(row, "prefill"):
                self._prefill(row, job)
        except Unserved as unserved:
            self._put_aside(row, job, unserved)
        except Exception as error:
            self._fail(row, job, error)
        else:
            if job.state.status is RequestStatus.DECODING:
                with self.times.phase(row, "draft"):
                    self.drafts.begin_row(self.rows, row)
                self._pass_on(row, job)

    def _put_aside(self, row: int, job: QueuedRequest, unserved: Unserved) -> None:
        """Report that plain `generate` writes a text; fail it if that is to be an error."""
        on_fallback = self.engine.builder.request.config.on_fallback
        try:
            fallback.report(self.engine.model, unserved, on_fallback)
        except Exception as error:
            self._fail(row, job, error)
        else:
            self.scheduler.put_aside(row, unserved)

    def _prefill(self, row: int, job: QueuedRequest) -> None:
        """Let a row decode once its prompt was read, which may take several steps."""
        if job.call is None:
            builder = self.engine.builder
            job.wanted = builder.wanted(job)
            self._read_log_probs(job)
            job.call = builder.call(job)
            job.constraint = find_constraint(job.call.processors, 1)
            job.rules = builder.rules(job.call, job.seed, job.wanted.of_tokens)
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

    def _read_log_probs(self, job: QueuedRequest) -> None:
        """Let the model read a prompt on its own, if the log probabilities there are wanted."""
        builder = self.engine.builder
        if job.wanted.of_prompt:
            self.setup.close()
            ids = builder.settings(job)["input_ids"]
            job.log_probs.of_prompt = of_prompt(builder.model, ids)

    def _after_prompt(self, row: int, call: PreparedCall, ids: np.ndarray) -> torch.Tensor | None:
        """Return logits after a prompt, [tokens], as [vocab]; None while it is being read."""
        prompts = self.prompts
        holder = prompts.holder(ids)
        if holder is not None:
            return prompts.share(row, holder)
        if self.scheduler.is_reading(ids):
            return None
        if prompts.reads_in_chunks(ids, bool(self.rows.live.any())):
            prompts.read(row, ids)
            return None
        self.setup.close()
        self.times.read_alone(row, len(ids))
        return prompts.take(row, call, self._set_up)

    def _set_up(self) -> None:
        self.setup.enter_context(compat.set_up_for_decoding(self.engine.model))

    def _alone(self, row: int) -> None:
        """Let plain `generate` write a text that cannot be decoded together with others."""
        job, (unserved, _) = self.scheduler.jobs[row], self.scheduler.alone[row]

        def on_token() -> bool:
            self._note_tokens(job, 1)
            self._free_cancelled()
            return not self._has(row, job) or self.engine.stops()

        self.setup.close()
        try:
            builder = self.engine.builder
            given = builder.settings(job), job.seed, on_token, job.wanted
            tokens, found = write_alone(self.engine.model, *given)
            if self.engine.stops():
                raise RuntimeError(STOPPED)
        except Exception as error:
            if self._has(row, job):  # not cancelled
                self._fail(row, job, error)
            return
        if self._has(row, job):
            job.state.generated_tokens = tokens
            job.log_probs = replace(found, of_prompt=job.log_probs.of_prompt)
            if (times := job.state.timestamps) is not None:
                del times[len(tokens) :]  # beams may go on after the best has ended
            self._finish(row, job, SpeculativeStats(fallback_reason=unserved.reason))

    def _pass_on(self, row: int, job: QueuedRequest) -> None:
        """Pass on the tokens of the latest step, and free the row if its text has ended.

        A request whose prompt is still read goes on with it.
        """
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
            job.log_probs.add(job.wanted, outputs.take(), new)
        self._note_tokens(job, len(new))
        if self.rows.finished[row]:
            state.generated_tokens = emitted.tolist()  # a processor may have edited earlier ones
            with self.times.phase(row, "draft"):
                self.drafts.end_row(self.rows, row)
            record = self.stats.of_row(
                self.rows,
                row,
                **self.times.of_row(row),
                engine=self.verifier.name,
                per_source=self.drafts.source_stats(row),
                num_undrafted=int(self.drafts.num_undrafted[row]),
                **self.runner.ways,
            )
            self._finish(row, job, record)
        elif state.streaming and new:
            self.engine.deliver(job)

    def _note_tokens(self, job: QueuedRequest, count: int) -> None:
        """Note that a text has so many new tokens."""
        if self.engine.progress is not None:
            self.engine.progress.emitted(count)
        if (times := job.state.timestamps) is not None:
            times += [time.perf_counter()] * count

    def _finish(self, row: int, job: QueuedRequest, stats: SpeculativeStats) -> None:
        self._free(row)
        job.state.status = RequestStatus.FINISHED
        self.engine.deliver(job, stats)

    def _fail(self, row: int, job: QueuedRequest, error: BaseException) -> None:
        self._free(row)
        job.state.error = f"{type(error).__name__}: {error}"
        job.state.status = RequestStatus.FAILED
        self.engine.deliver(job)

    def _free(self, row: int) -> None:
        self.most_new[row] = 0
        for part in (self.scheduler, self.rows, self.verifier, self.stats, self.times):
            part.free(row)

    def output(self) -> None:
        """Nothing: texts are passed on as they end."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self.runner.end()
        self.drafts.end(self.rows)
        for row, job in list(self.scheduler.jobs.items()):
            self._fail(row, job, error or RuntimeError(STOPPED))


def decode(engine: Engine) -> None:
    """Decode until no request waits, or the run stops."""
    engine.cancelled()  # ids that nobody has any more
    with torch.no_grad():
        while engine.waiting and not engine.stops():
            run(new_session(engine))


def new_session(engine: Engine) -> QueueSession:
    """Return a session with free rows only.

    Raises:
        ValueError: An option or a pool is wrong.
    """
    builder, num_rows = engine.builder, engine.max_slots
    model, request = builder.model, builder.request
    do_sample = bool(builder.generation_config.do_sample)
    rows, most_new = Rows.without_texts(num_rows), np.zeros(num_rows, np.int64)
    scheduler = Scheduler(num_rows, engine.take, engine.max_batch_tokens)

    def grammar_of(row: int) -> Grammar | None:
        job = scheduler.jobs.get(row)
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
        prompts=Prompts(runner, scheduler),
        processes=Processes(),
        stats=stats,
        times=RowTimes(num_rows, stats),
        scheduler=scheduler,
        most_new=most_new,
        engine=engine,
    )
