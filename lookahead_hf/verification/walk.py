"""The walk: at each node score, choose, emit, ask the criteria, then step to the child.

Rows walk one by one, or all in lockstep.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from lookahead_hf.call.emitter import Emitter, take_edits
from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.draft import ROOT, DraftTree, Verdict
from lookahead_hf.kernels import argmax
from lookahead_hf.logits.row_processors import RowProcessors, check_scores
from lookahead_hf.rows import Rows
from lookahead_hf.runner.outputs import DeviceOutputs
from lookahead_hf.runner.processes import Processes, StepMessage
from lookahead_hf.verification.noise import Noise, OwnGenerators, refuse_unless


class Verifier:
    """Decides which draft tokens are accepted, and emits the tokens of each step."""

    name = ""  # the engine's name in statistics

    def __init__(self, processes: Processes | None = None) -> None:
        """`processes`: who decides if several of them run the model."""
        self._processes = processes or Processes()

    def first(self, rows: Rows, logits: torch.Tensor) -> Verdict:
        """Emit the token after the prompt, from the logits there, [rows, 1, vocab]."""
        return self._decide(rows, DraftTree.empty(rows.num_rows), logits)

    def complete(self, rows: Rows, draft: DraftTree) -> DraftTree:
        """Return the draft with the nodes that verification needs in addition."""
        return draft

    def read(self, rows: Rows, draft: DraftTree, step: Any) -> Verdict:
        """Decide a step that the runner's `launch` returned, and emit its tokens."""
        return self._decide(rows, draft, step.logits)

    def _decide(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        self._processes.ready()
        verdict = self.verify(rows, draft, logits)
        self._processes.decided(rows, verdict)
        return verdict

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        """Decide a step from the target's logits, [rows, 1 + most nodes, vocab]; see `read`."""
        raise NotImplementedError

    def feed_pad(self, rows: Rows, row: int, logits: torch.Tensor) -> None:
        """Append a pad to a finished row, as plain does until the last row ends.

        `logits`, [vocab], are the target's after the row's newest token.
        """
        raise NotImplementedError  # in lockstep, where the steps append the pads

    def end(self, rows: Rows) -> None:
        """Leave the default random generator as plain does after the tokens that were shown."""


class Choice(NamedTuple):
    """What follows a node of a row."""

    token: int  # the next token
    child: int | None = None  # the child of the node with this token, None if there is none
    stops: bool | None = None  # whether the text ends with the token; None to ask the criteria


Decide = Callable[[int], Choice]  # Chooses what follows a node of one row


@dataclass(eq=False, slots=True)
class Rules:
    """How tokens are chosen for a call's rows. A queued request is a one-row call in any row."""

    processors: RowProcessors  # processors and warpers, applied to a node with its own prefix
    emitter: Emitter  # emits the tokens
    do_sample: bool = False  # whether tokens are sampled; otherwise the likeliest is chosen
    in_order: bool = False  # whether the default generator draws, token by token in plain's order
    seed: int | None = None  # samples are plain's after `manual_seed(seed)`, if there is one
    generators: OwnGenerators | None = None  # what unknown parts of a request draw from
    noise: Noise | None = None  # what samples are chosen by, unless they are drawn in order

    @property
    def takes_likeliest(self) -> bool:
        """Whether the likeliest token is chosen, and the scores are not asked for."""
        return not (self.do_sample or self.emitter.outputs.chooses) and self.processors.empty

    def begin(self, vocab: int) -> None:
        """Prepare the noise of samples, before the first token."""
        if self.do_sample and not self.in_order:
            shape = self.processors.num_rows, vocab
            self.noise = Noise(*shape, self.emitter.device, seed=self.seed)

    def drawing(self) -> AbstractContextManager[None]:
        """Let this thread draw from the generators of the text inside."""
        return nullcontext() if self.generators is None else self.generators.in_place()

    def choose(self, rows: Rows, row: int, logits: torch.Tensor) -> int:
        """Return the token that plain `generate` chooses after logits, [vocab]."""
        if self.takes_likeliest:
            return argmax(logits)
        scores = self.score(rows, row, logits)
        if not self.do_sample:
            return argmax(scores[0])
        probs = scores.softmax(-1)
        if self.noise is None:
            return int(torch.multinomial(probs, 1))
        return self.noise.pick(probs[0], self.emitter.place(row), int(rows.num_emitted[row]))

    def score(self, rows: Rows, row: int, logits: torch.Tensor) -> torch.Tensor:
        """Return the processed scores after logits, [1, vocab] float32; keep them if requested."""
        processors, emitter = self.processors, self.emitter
        raw = logits[None].to(copy=True, dtype=torch.float32, device=emitter.device)
        scores = raw
        if not processors.empty:
            ids = emitter.ids(rows, row)
            scores = processors(emitter.place(row), ids, raw)
            if not processors.all_known:
                check_scores(scores, self.do_sample)
                rows.rewrite(row, ids[0])
        emitter.choose(row, scores[0], raw[0])
        return scores


DecideStep = Callable[
    [Callable[[int], Rules], Rows, DraftTree, torch.Tensor], Callable[[int], Decide]
]
"""Takes the rules by row, the rows, the draft and the logits of a step, [rows, 1 + most nodes,
vocab]; returns how each row decides, by row."""


def on_host(
    rules_of: Callable[[int], Rules], rows: Rows, draft: DraftTree, logits: torch.Tensor
) -> Callable[[int], Decide]:
    """Decide as plain `generate` chooses tokens, where the walk gets; see `DecideStep`."""
    # One launch and one copy for all rows on an accelerator, where each number that is read waits.
    # On a CPU it is faster to look only at the nodes that the walk reaches.
    going = np.flatnonzero(rows.live).tolist() if logits.device.type != "cpu" else ()
    at_once = any(rules_of(row).takes_likeliest for row in going)
    likeliest = logits.argmax(-1).cpu().numpy() if at_once else None  # [rows, nodes]

    def of_row(row: int) -> Decide:
        rules = rules_of(row)
        known = likeliest if rules.takes_likeliest else None

        def decide(node: int) -> Choice:
            at = row, node + 1
            token = rules.choose(rows, row, logits[at]) if known is None else int(known[at])
            return Choice(token, draft.child_of(row, node, token))

        return decide

    return of_row


def following(receive: Callable[[], StepMessage]) -> DecideStep:
    """Return how rows decide as another process did, whose decisions are received step by step.

    Processors and generators of this process are asked, too, as are its criteria.
    """

    def of_step(
        rules_of: Callable[[int], Rules], rows: Rows, draft: DraftTree, logits: torch.Tensor
    ) -> Callable[[int], Decide]:
        message = receive()
        verdict = message.verdict
        own = on_host(rules_of, rows, draft, logits)

        def of_row(row: int) -> Decide:
            decide_alone = own(row)
            tokens = iter(verdict.emitted(row).tolist())
            path = iter(verdict.accepted(row).tolist())

            def decide(node: int) -> Choice:
                decide_alone(node)
                is_last = int(rows.num_emitted[row]) + 1 == int(message.num_text[row])
                stops = bool(verdict.finished[row]) and is_last
                return Choice(next(tokens), next(path, None), stops)

            return decide

        return of_row

    return of_step


class Walk(Verifier):
    """Verifies row by row and node by node; processors and criteria see what plain shows them.

    Attributes:
        errors: Exceptions that have ended texts of a queue, by row.
    """

    def __init__(
        self,
        rules: Rules | None = None,
        processes: Processes | None = None,
        decide: DecideStep = on_host,
        name: str = "walk",
    ) -> None:
        """Walk a batch by its `rules`, or (None) a queue, whose texts bring their own.

        `processes` decide if several run the model; `decide` where no device has decided. `name` is
        the engine's in statistics.
        """
        super().__init__(processes)
        self._of_batch, self._of_texts = rules, dict[int, Rules]()
        self._decide_step, self.name = decide, name
        self.errors: dict[int, Exception] = {}

    @property
    def rules(self) -> Rules:
        assert self._of_batch is not None
        return self._of_batch

    def rules_of(self, row: int) -> Rules:
        return self._of_batch or self._of_texts[row]

    def takes_likeliest(self, rows: Rows) -> bool:
        """Return whether all live rows of a queue take their likeliest tokens."""
        return all(self.rules_of(row).takes_likeliest for row in np.flatnonzero(rows.live).tolist())

    def take(self, rows: Rows, row: int, rules: Rules, logits: torch.Tensor) -> None:
        """Emit the first token of a text in a row of a queue, by the logits, [vocab]."""
        self._of_texts[row], rules.emitter.first_row = rules, row
        rules.begin(len(logits))
        with rules.drawing():
            rules.emitter.emit(rows, row, rules.choose(rows, row, logits))

    def free(self, row: int) -> None:
        """Forget the text of a row of a queue."""
        self._of_texts.pop(row, None)
        self.errors.pop(row, None)

    def first(self, rows: Rows, logits: torch.Tensor) -> Verdict:
        self.rules.begin(logits.shape[-1])
        return super().first(rows, logits)

    def end(self, rows: Rows) -> None:
        rules, columns = self.rules, self.rules.emitter.num_shown(rows)
        if rules.noise is not None:
            rules.noise.finish(columns)
        if rules.processors.keeps_state:
            ids = np.stack([rows.ids(row)[: rows.prompt_columns] for row in range(rows.num_rows)])
            shown = np.minimum(rows.num_text, columns - 1).tolist()
            texts = [rows.emitted(row)[:count].tolist() for row, count in enumerate(shown)]
            rules.processors.end(torch.from_numpy(ids).to(rules.emitter.device), texts)

    def feed_pad(self, rows: Rows, row: int, logits: torch.Tensor) -> None:
        if self.rules.emitter.outputs.chooses:
            self.rules.score(rows, row, logits)
        self.rules.emitter.feed_pad(rows, row)

    def read(self, rows: Rows, draft: DraftTree, step: Any) -> Verdict:
        """Decide a step and emit its tokens, or emit what the device has decided."""
        if not isinstance(step, DeviceOutputs):
            return super().read(rows, draft, step)
        walked = step.walk.take()
        is_finite = None if step.is_finite is None else step.is_finite.take()

        def on_device(row: int) -> Decide:
            of_row = None if is_finite is None else is_finite[row]
            return along(walked[row], draft.token_ids[draft.row(row)], of_row)

        return self._walk(rows, on_device)

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        return self._walk(rows, self._decide_step(self.rules_of, rows, draft, logits))

    def _walk(self, rows: Rows, decider: Callable[[int], Decide]) -> Verdict:
        """Walk down every live row's tree; an error ends the text in a queue, else the call."""
        live = rows.live
        tokens: list[list[int]] = [[] for _ in range(rows.num_rows)]
        paths: list[list[int]] = [[] for _ in range(rows.num_rows)]
        for row in np.flatnonzero(live).tolist():
            rules = self.rules_of(row)
            try:
                with rules.drawing():
                    _walk_row(rows, row, rules.emitter, decider(row), tokens[row], paths[row])
            except Exception as error:
                if self._of_batch is not None:
                    raise
                self.errors[row], live[row] = error, False
                tokens[row], paths[row] = [], []
                rows.end(row)
        return Verdict.from_rows(tokens, paths, live, rows.finished.copy())


def _walk_row(
    rows: Rows, row: int, emitter: Emitter, decide: Decide, tokens: list[int], path: list[int]
) -> None:
    """Append the tokens that a row emits to `tokens`, and its accepted nodes to `path`."""
    while True:
        token, child, stops = decide(path[-1] if path else ROOT)
        tokens.append(token)
        ends = emitter.emit(rows, row, token, stops)
        tokens[-1] = rows.last_token(row)
        if ends or child is None or tokens[-1] != token:  # A criterion may have edited it.
            return
        path.append(child)


def along(
    walked: np.ndarray,  # [2 + width] integers
    drafted: np.ndarray,  # [nodes] integers
    is_distribution: np.ndarray | None,  # [width]
) -> Decide:
    """Return a function that follows the path of a row, `TreeWalk.packed`, walked on the device.

    `is_distribution`: whether the probabilities after the last token and after each node are
    finite; None if the tokens were not chosen by probabilities.
    """
    accepted, bonus = int(walked[0]), int(walked[1])
    after = dict(pairwise((walked[2 : 3 + accepted] - 1).tolist()))

    def decide(node: int) -> Choice:
        refuse_unless(is_distribution is None or bool(is_distribution[node + 1]))
        child = after.get(node)
        return Choice(bonus if child is None else int(drafted[child]), child)

    return decide


class Lockstep(Verifier):
    """Calls processors and criteria once per decoding step, with plain's own [rows, columns].

    The walk goes on while every row has a child with its token. A finished row is fed pads, as in
    plain, and its draft is pads, so that it does not hold the others up. Without an eos criterion
    plain goes on with finished rows until all have finished; here they count as live until then.
    Where another process decides, its tokens are emitted.
    """

    name = "lockstep"

    def __init__(self, call: PreparedCall, emitter: Emitter, processes: Processes) -> None:
        super().__init__(processes)
        self._processors, self._do_sample, self._emitter = call.processors, call.do_sample, emitter

    def complete(self, rows: Rows, draft: DraftTree) -> DraftTree:
        """Draft the pads that finished rows will be fed."""
        pad = self._emitter.pad
        if pad is None or not rows.finished.any() or not draft.num_nodes:
            return draft
        return draft.with_chains(np.full(int(draft.depth.max()), pad), rows.finished)

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        receive = self._processes.receive
        message = None if receive is None else receive()
        live, before = rows.live, rows.num_text
        tokens: list[list[int]] = []  # [rows] of each decoding step
        paths: list[list[int]] = []  # [rows] of each decoding step but the last
        every = torch.arange(rows.num_rows, device=logits.device)
        nodes = [ROOT] * rows.num_rows
        while True:
            at = torch.tensor(nodes, device=logits.device) + 1
            chosen = self._chosen(rows, logits[every, at])
            if self._emitter.pad is not None:
                chosen[rows.finished] = self._emitter.pad
            ended = None
            if message is not None:
                decided = message.verdict
                chosen = decided.token_ids[decided.token_offsets[:-1] + len(tokens)]
                ended = decided.finished & (message.num_text <= rows.num_emitted + 1)
            self._emitter.emit_to_all(rows, chosen.tolist(), ended)
            tokens.append(rows.last_tokens.tolist())
            if not rows.live.any():
                break
            reached = zip(nodes, tokens[-1], strict=True)
            children = [draft.child_of(row, *at) for row, at in enumerate(reached)]
            if None in children:
                break
            nodes = [child for child in children if child is not None]
            paths.append(nodes)
        by_row = [[step[row] for step in tokens] for row in range(rows.num_rows)]
        path_of = [[step[row] for step in paths] for row in range(rows.num_rows)]
        finished = rows.finished.copy()
        return Verdict.from_rows(by_row, path_of, live, finished, rows.num_text - before)

    def _chosen(self, rows: Rows, logits: torch.Tensor) -> np.ndarray:
        """Choose the next token of all rows as plain does, [rows]; `logits` are [rows, vocab]."""
        ids = self._emitter.all_ids(rows)
        raw = logits.to(copy=True, dtype=torch.float32, device=self._emitter.device)
        scores = self._processors(ids, raw)
        check_scores(scores, self._do_sample)
        take_edits(rows, ids)
        for row in range(rows.num_rows):
            self._emitter.choose(row, scores[row], raw[row])
        if self._do_sample:
            chosen = torch.multinomial(scores.softmax(-1), 1)[:, 0]
        else:
            chosen = scores.argmax(-1)
        return chosen.to("cpu").numpy().astype(np.int64)
