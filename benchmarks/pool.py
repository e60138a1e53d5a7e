"""Time what drafting from n-grams costs: insertions, trees and look-ups, beside two linear scans.

The text is Python source of this installation in words and letters, so no model is needed. A tree
has up to 64 nodes. The scans return one chain of ten tokens: KMP is a single pass for the longest
suffix, in numba, as vLLM looks n-grams up; HF is transformers' own prompt lookup. Each look-up has
another context; `cold` ones come after 64 MB of other memory, as after a model's forward.

    python benchmarks/pool.py
    python benchmarks/pool.py --pool-tokens 1000000 --looks 100 --json pool.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import site
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from lookahead_hf import ngram_pool
from lookahead_hf.cli import env
from lookahead_hf.drafting.calibration import Calibration
from lookahead_hf.drafting.ensemble import Ensemble
from lookahead_hf.drafting.ngram import NgramDrafter
from lookahead_hf.drafting.pool import PoolDrafter
from lookahead_hf.drafting.recycling import RecyclingDrafter
from lookahead_hf.ngram_pool import NgramPool, SuffixIndex
from lookahead_hf.rows import Rows
from lookahead_hf.steps import DraftTree, Verdict

NODES = 64
CONTEXTS = (500, 5_000, 100_000)
INSERTIONS = (5_000, 100_000)
VOCABULARY = 49_152


@dataclass(frozen=True)
class Line:
    """One line of the result."""

    what: str
    size: int | None  # tokens of the context, or that were inserted
    unit: str
    best: float
    median: float
    cold: float | None = None  # median of the cold ones


def read_text(num_tokens: int) -> np.ndarray:
    """Token ids of Python source, as many as there are up to `num_tokens`, [num_tokens] int32."""
    words: list[str] = []
    for source in _sources():
        words += re.findall(r"\w+|\s+|[^\w\s]", source)
        if len(words) > num_tokens:
            break
    letters = sorted({letter for word in words[:1_000_000] for letter in word})
    frequent = [word for word, _ in Counter(words).most_common(VOCABULARY) if len(word) > 1]
    known = {token: id for id, token in enumerate((letters + frequent)[:VOCABULARY])}
    ids: list[int] = []
    for word in words:
        if word in known:
            ids.append(known[word])
        else:
            ids.extend(known.get(letter, 0) for letter in word)
    return np.array(ids[:num_tokens], np.int32)


def _sources() -> Iterator[str]:
    folders = [sysconfig.get_path("stdlib"), *site.getsitepackages()]
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.py"))
    random.Random(0).shuffle(files)
    for file in files:
        if file.stat().st_size < 200_000:
            yield file.read_text(encoding="utf-8", errors="replace")


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Looks:
    """Times many look-ups of one kind."""

    def __init__(self, num_looks: int) -> None:
        self._num_looks = num_looks
        self._other_memory = np.ones(64 << 20, np.uint8)

    def time(
        self, what: str, size: int, look: Callable[[], Any], advance: Callable[[], Any]
    ) -> Line:
        """Call `look` again and again, `advance` moves on to the next context in between."""
        look()
        warm, cold = [], []
        for _ in range(self._num_looks):
            advance()
            warm.append(timed(look))
        for _ in range(min(self._num_looks, 100)):
            advance()
            self._other_memory.sum()
            cold.append(timed(look))
        return Line(
            what, size, "us", 1e6 * min(warm), 1e6 * float(np.median(warm)),
            1e6 * float(np.median(cold)),
        )  # fmt: skip


def insertions(text: np.ndarray, rounds: int = 7) -> Iterator[Line]:
    """Million tokens a second into a new suffix index and a new pool."""
    for size in INSERTIONS:
        new = text[:size]
        for what, insert in (
            ("suffix index", lambda new=new: SuffixIndex().extend(new)),
            ("pool", lambda new=new: NgramPool().add(new)),
        ):
            speeds = [size / timed(insert) / 1e6 for _ in range(rounds)]
            speed = float(np.median(speeds))
            yield Line(f"insert into a {what}", size, "M tokens/s", max(speeds), speed)


def scans(text: np.ndarray, size: int, looks: Looks) -> Iterator[Line]:
    """One chain by a linear pass over the context."""
    end = [size]

    def advance() -> None:
        end[0] += 1

    yield looks.time("KMP scan (10 tokens)", size, lambda: scan(text[: end[0]], 5, 10), advance)
    lookup = PromptLookupCandidateGenerator(max_length=len(text))
    ids = torch.from_numpy(text.astype(np.int64))[None]
    yield looks.time(
        "HF prompt lookup (10)", size, lambda: lookup.get_candidates(ids[:, : end[0]]), advance
    )


@njit
def scan(text, max_ngram, num_tokens):  # type: ignore[no-untyped-def]
    """What followed the first occurrence of the longest suffix, of `max_ngram` tokens at most.

    The failure function of Knuth, Morris and Pratt over the reversed text: its prefixes are the
    text's suffixes.
    """
    length, best, place = len(text), 0, 0
    failure = np.zeros(max_ngram + 1, np.int64)
    equal = 0
    for i in range(1, length):
        if equal == max_ngram:
            equal = failure[equal - 1]
        while equal > 0 and text[length - 1 - i] != text[length - 1 - equal]:
            equal = failure[equal - 1]
        if text[length - 1 - i] == text[length - 1 - equal]:
            equal += 1
        if i <= max_ngram:
            failure[i] = equal
        if equal >= best:
            best, place = equal, length - 1 - i + equal
    return text[place : place + num_tokens] if best else text[:0]


def trees(text: np.ndarray, size: int, pool: NgramPool, looks: Looks) -> Iterator[Line]:
    """Trees of 64 nodes after `size` tokens and the ones that follow."""
    index, rates = SuffixIndex(), NgramDrafter().prior()
    index.extend(text[:size])
    end = [size]

    def advance() -> None:
        index.extend(text[end[0] : end[0] + 1])
        end[0] += 1

    yield looks.time("suffix index", size, lambda: index.grow(rates, NODES), advance)
    for what, sources in (
        ("n-grams, recycling, merged", [NgramDrafter(), RecyclingDrafter()]),
        ("n-grams, recycling, pool", [NgramDrafter(), RecyclingDrafter(), PoolDrafter(pool)]),
    ):
        yield looks.time(what, size, *drafting(text, size, sources))


def drafting(text: np.ndarray, size: int, sources: list[Any]) -> tuple[Callable[[], Any], ...]:
    """What drafts from all sources, and what moves on by one token."""
    ids = text.astype(np.int64)
    rows = Rows(ids[None, : size - 1])
    ensemble = Ensemble(sources, Calibration(sources))
    rows.emit(0, int(ids[size - 1]))
    ensemble.begin(rows)
    _teach(ids[: size + 1_000], sources)

    def advance() -> None:
        token = ids[len(rows.context(0))]
        rows.emit(0, int(token))
        verdict = Verdict(
            np.array([0, 1]), token[None], np.zeros(2, np.int64), np.empty(0, np.int32),
            np.array([True]), np.array([False]),
        )  # fmt: skip
        sources[0].observe(rows, DraftTree.empty(1), verdict, torch.empty(0))

    return lambda: ensemble.propose(rows, NODES), advance


def _teach(ids: np.ndarray, sources: list[Any]) -> None:
    """Logits that rank the token that comes first and others behind it."""
    rng = np.random.default_rng(0)
    top = rng.integers(0, VOCABULARY, (len(ids) - 1, 12))
    top[:, 0] = ids[1:]
    probs = np.broadcast_to(0.5 ** np.arange(1.0, 13.0), top.shape)
    rows = Rows(ids[None, :-1])
    rows.emit(0, int(ids[-1]))
    for source in sources:
        if isinstance(source, RecyclingDrafter):
            source.seed(rows, 0, 0, top, probs)


def pools(text: np.ndarray, fresh: np.ndarray, looks: Looks) -> Iterator[Line]:
    """A large pool: filling it, its file, and look-ups with contexts that it does not hold."""
    pool = NgramPool(len(text))
    pieces = np.array_split(text[: -len(text) // 100], max(1, len(text) // 5_000))
    speeds = [len(piece) / timed(lambda piece=piece: pool.add(piece)) / 1e6 for piece in pieces]
    yield Line("fill a pool", len(pool), "M tokens/s", max(speeds), float(np.median(speeds)))
    nbytes = pool.info.nbytes / len(pool)
    yield Line("memory and file of a pool", len(pool), "bytes/token", nbytes, nbytes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pool"
        seconds = timed(lambda: pool.save(path))
        yield Line("save a pool", len(pool), "ms", 1e3 * seconds, 1e3 * seconds)
        opening = [1e3 * timed(lambda: NgramPool.load(path)) for _ in range(20)]
        yield Line("open a pool", len(pool), "ms", min(opening), float(np.median(opening)))
        yield from pool_looks(NgramPool.load(path), fresh, looks)


def pool_looks(pool: NgramPool, fresh: np.ndarray, looks: Looks) -> Iterator[Line]:
    rates = PoolDrafter(pool).prior()
    end = [100]

    def advance() -> None:
        end[0] = 100 + (end[0] + 97) % (len(fresh) - 100)

    for what, nodes in (("look a context up in a pool", 1), ("pool", NODES)):
        yield looks.time(
            what, len(pool), lambda nodes=nodes: pool.grow(fresh[: end[0]], rates, nodes), advance
        )


def measure(arguments: argparse.Namespace) -> Iterator[Line]:
    ngram_pool.compile_now()
    text = read_text(arguments.pool_tokens + 200_000)
    fresh, old = text[:200_000], text[200_000:]
    looks = Looks(arguments.looks)
    yield from insertions(fresh)
    yield from pools(old, fresh, looks)
    pool = NgramPool()
    pool.add(old[:1_000_000])
    for size in CONTEXTS:
        yield from trees(fresh, size, pool, looks)
        yield from scans(fresh, size, looks)


def show(line: Line) -> str:
    size = "" if line.size is None else f"{line.size:,}"
    cold = "" if line.cold is None else f"{line.cold:10.1f}"
    return f"{line.what:28}{size:>12}{line.best:10.2f}{line.median:10.2f}{cold:10}  {line.unit}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pool-tokens", type=int, default=10_000_000)
    parser.add_argument("--looks", type=int, default=400, help="look-ups of each kind")
    parser.add_argument("--json", type=Path, help="write the lines there, too")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"{'':28}{'tokens':>12}{'best':>10}{'median':>10}{'cold':>10}")
    lines = []
    for line in measure(arguments):
        print(show(line), flush=True)
        lines.append(line)
    if arguments.json:
        about = {"device": env.cpu_name(), "load_average": os.getloadavg()[0], **env.versions()}
        found = {"about": about, "lines": list(map(asdict, lines))}
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
