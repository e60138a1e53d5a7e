"""Time what drafting takes of the host, by the rows of a batch, on recorded texts.

No model runs: a recorded text decides what is accepted, and recorded tokens stand out of the
logits, at a rejected node those that were recorded after the same token elsewhere. Every row drafts
as many nodes as `--nodes` says. Two systems:

    cpu     the best tokens are searched in the logits, in bfloat16, as on a CPU
    device  they have arrived from a device, which searched them beside the step

Times are medians over the steps before the first row ends, in microseconds per row.

    python benchmarks/drafting_cost.py --rows 1,4,8,32
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import common
import numpy as np
import torch
from call_replay import MemoryHolder, Text, accepted_path
from record import folder_of, recorded

from lookahead_hf import SpeculativeConfig
from lookahead_hf.call.prepared import Request
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting import ensemble
from lookahead_hf.drafting.budget import FixedRunner
from lookahead_hf.drafting.registry import build
from lookahead_hf.drafting.session import DraftSession, Limits
from lookahead_hf.drafting.topk import BestTokens
from lookahead_hf.ngram_pool import compilation
from lookahead_hf.rows import Rows

SYSTEMS = ("cpu", "device")
RECORDED = 12
"""Recorded tokens that stand out of the logits at a place."""


@dataclass(frozen=True)
class Line:
    """What drafting took with so many rows, in microseconds per row."""

    system: str
    rows: int
    propose: float
    observe: float
    steps: int
    nodes: float  # verified, per row and step
    tokens: float  # per row and step

    @property
    def total(self) -> float:
        """Both together."""
        return self.propose + self.observe


class Batch:
    """Recorded texts as the rows of one call."""

    def __init__(self, texts: Sequence[Text], vocab_size: int) -> None:
        width = max(len(text.prompt) for text in texts)
        ids = np.zeros((len(texts), width), np.int64)
        for row, text in enumerate(texts):
            ids[row, width - len(text.prompt) :] = text.prompt
        lengths = np.array([len(text.prompt) for text in texts])
        self.texts = texts
        self.rows = Rows(ids, np.arange(width) >= width - lengths[:, None])
        for row, text in enumerate(texts):
            self.rows.emit(row, int(text.output[0]))
        self._places = [(text, at) for text in texts for at in range(len(text.top_ids))]
        self._place_of = {int(text.tokens[at]): (text, at) for text, at in self._places}
        self._background = torch.randn(8, vocab_size).bfloat16()

    def verify(self, draft: DraftTree) -> Verdict:
        """Accept of every row what its text says, and emit it."""
        tokens, paths = [], []
        for row, text in enumerate(self.texts):
            done, of_row = int(self.rows.num_emitted[row]), draft.row(row)
            alone = DraftTree.from_rows([(draft.token_ids[of_row], draft.parents[of_row])])
            path = accepted_path(alone, text.output[done:-1])
            path = [] if self.rows.finished[row] else path
            new = [] if self.rows.finished[row] else text.output[done : done + len(path) + 1]
            tokens.append(list(map(int, new)))
            paths.append(path)
        live = self.rows.live
        for row, new in enumerate(tokens):
            for token in new:
                self.rows.emit(row, token)
            if self.rows.live[row] and self.rows.num_emitted[row] == len(self.texts[row].output):
                self.rows.end(row)
        return Verdict.from_rows(tokens, paths, live, self.rows.finished.copy())

    def logits(self, draft: DraftTree, verdict: Verdict) -> torch.Tensor:
        """What the target says at every node."""
        width = 1 + draft.max_nodes
        chosen = torch.arange(len(self.texts) * width) % len(self._background)
        logits = self._background[chosen].view(len(self.texts), width, -1)
        for row, text in enumerate(self.texts):
            at = len(text.prompt) + int(self.rows.num_emitted[row]) - 1
            at -= int(verdict.num_emitted[row])
            path = [0, *(verdict.accepted(row) + 1).tolist()]
            for node, token in enumerate(draft.token_ids[draft.row(row)].tolist(), 1):
                if node not in path:
                    place = self._place_of.get(token, self._places[token % len(self._places)])
                    _stand_out(logits[row, node], *place)
            for node in path[: verdict.num_emitted[row]]:
                _stand_out(logits[row, node], text, at)
                at += 1
        return logits


def _stand_out(logits: torch.Tensor, text: Text, at: int) -> None:
    """Raise what was recorded at a place of a text out of a node's logits, [vocab]."""
    ids = torch.from_numpy(text.top_ids[at, :RECORDED].astype(np.int64))
    logits[ids] = torch.linspace(24, 12, len(ids)).bfloat16()


class Arrived(BestTokens):
    """Best tokens that a device has found before anybody asks for them."""

    def __init__(self, logits: torch.Tensor, top_k: int, few: int | None = None) -> None:
        super().__init__(logits, top_k, few)
        every = np.arange(self._flat.shape[0])
        self._found = super().take(every // self._width, every % self._width)

    def take(
        self, rows: np.ndarray, places: np.ndarray, counts: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        which = rows * self._width + places
        most = None if counts is None else int(counts.max(initial=0))
        return self._found[0][which, :most], self._found[1][which, :most]


def measure(texts: Sequence[Text], system: str, vocab_size: int, nodes: int) -> Line:
    """Draft the texts as one call."""
    batch = Batch(texts, vocab_size)
    config, limits = SpeculativeConfig(), Limits(False, vocab_size, 2**31)
    sources = build(Request(config))
    drafts = DraftSession(MemoryHolder(), config, batch.rows, sources, limits, FixedRunner())
    drafts._budget.choose = lambda tree: np.minimum(np.diff(tree.row_offsets), nodes)  # type: ignore[method-assign]
    drafts.begin(batch.rows)
    proposed, observed, num_drafted, num_tokens, count = [], [], 0, 0, len(texts)
    while batch.rows.live.all():
        draft, seconds = timed(drafts.propose, batch.rows)
        proposed.append(seconds)
        verdict = batch.verify(draft)
        logits = batch.logits(draft, verdict)
        step = SimpleNamespace(logits=logits)
        if system == "device":
            drafts.prepare(step)  # beside the forward
            spent = 0.0
        else:
            _, spent = timed(drafts.prepare, step)
        _, seconds = timed(drafts.observe, batch.rows, draft, verdict, logits, 1.0)
        observed.append(spent + seconds)
        num_drafted, num_tokens = num_drafted + draft.num_nodes, num_tokens + len(verdict.token_ids)
    drafts.end(batch.rows)
    proposing, observing = (1e6 * statistics.median(part) / count for part in (proposed, observed))
    steps = len(proposed)
    per_row = num_drafted / steps / count, num_tokens / steps / count
    return Line(system, count, proposing, observing, steps, *per_row)


def timed(call: Any, *arguments: Any) -> tuple[Any, float]:
    """What a call returns and the seconds it takes."""
    start = time.perf_counter()
    result = call(*arguments)
    return result, time.perf_counter() - start


def lines(arguments: argparse.Namespace, texts: Sequence[Text], vocab: int) -> Iterator[Line]:
    """Measure every system with every number of rows."""
    for rows in arguments.rows:
        chosen = list(itertools.islice(itertools.cycle(texts), rows))
        for system in SYSTEMS:
            found = Arrived if system == "device" else BestTokens
            with mock.patch.object(ensemble, "BestTokens", found):
                yield measure(chosen, system, vocab, arguments.nodes)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder or hub name (default: the demo's model)")
    parser.add_argument(
        "--rows", type=lambda text: list(map(int, text.split(","))), default=[1, 4, 8, 32]
    )
    parser.add_argument("--prompts-per-family", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--nodes", type=int, default=4, help="draft tokens per row and step")
    parser.add_argument("--threads", type=int, help="torch's threads")
    parser.add_argument("--json", type=Path, help="write the lines there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    place = "float32", "cpu", arguments.threads
    load = functools.cache(lambda: common.load(arguments.model, *place))
    from lookahead_hf.utils import cache_root

    model, _ = load()
    folder = folder_of(model, cache_root() / "texts")
    chosen = slice(8, 8 + arguments.prompts_per_family)
    texts = recorded(load, chosen, arguments.new_tokens, folder)
    texts = [text for text in texts if len(text.output) == arguments.new_tokens]
    compilation.wait([compilation.drafting])
    measured = list(lines(arguments, texts, model.config.vocab_size))
    print("| system | rows | propose | observe | both | nodes per row | tokens per row step |")
    print("|---|---|---|---|---|---|---|")
    for line in measured:
        print(
            f"| {line.system} | {line.rows} | {line.propose:.0f} | {line.observe:.0f} "
            f"| {line.total:.0f} | {line.nodes:.1f} | {line.tokens:.2f} |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(line) for line in measured], indent=1) + "\n")


if __name__ == "__main__":
    main()
