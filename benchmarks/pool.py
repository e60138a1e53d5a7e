"""Time drafting from n-grams: insertions, trees and look-ups.

The text is the Python source of this installation in words and letters, so no model is needed. A
tree has up to 64 nodes: `propose` is the whole call, and `observe` learns from a step that verified
16 nodes, mostly from their logits. The fastest of three calls per context counts, and `median` is
over the contexts; `cold` calls are single calls after reading 64 MB of other memory, as after a
forward.

    python benchmarks/pool.py
    python benchmarks/pool.py --pool-tokens 1000000 --looks 100 --json pool.json
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from lines import Report
from pool_drafting import NODES, Line, Looks, timed, trees
from pool_text import read_text

from lookahead_hf.ngram_pool import NgramPool, SuffixIndexes, compilation
from lookahead_hf.sources.pool import PoolDrafter
from lookahead_hf.tools.cli.commands import env

CONTEXTS = (500, 5_000, 100_000)
INSERTIONS = (5_000, 100_000)


def insertions(text: np.ndarray, rounds: int = 7) -> Iterator[Line]:
    """Measure million tokens per second into a new suffix index and a new pool."""
    for size in INSERTIONS:
        new = text[:size]
        for what, insert in (
            ("suffix index", lambda new=new: SuffixIndexes(1).extend(np.array([0, len(new)]), new)),
            ("pool", lambda new=new: NgramPool().add(new)),
        ):
            speeds = [size / timed(insert) / 1e6 for _ in range(rounds)]
            speed = float(np.median(speeds))
            yield Line(f"insert into a {what}", size, "M tokens/s", max(speeds), speed)


def pools(text: np.ndarray, fresh: np.ndarray, looks: Looks) -> Iterator[Line]:
    """Measure a large pool: filling it, its file, and look-ups with contexts that it lacks."""
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
        yield from pool_looks("opened pool", NgramPool.load(path), fresh, looks)
    yield from pool_looks("pool", pool, fresh, looks)


def pool_looks(name: str, pool: NgramPool, fresh: np.ndarray, looks: Looks) -> Iterator[Line]:
    rates = PoolDrafter.traits.prior
    end = [100]

    def advance() -> None:
        end[0] = 100 + (end[0] + 97) % (len(fresh) - 100)

    for what, nodes in ((f"look-up, {name}", 1), (f"tree, {name}", NODES)):
        yield looks.time(
            what, len(pool), lambda nodes=nodes: pool.grow([fresh[: end[0]]], rates, nodes), advance
        )


def measure(arguments: argparse.Namespace) -> Iterator[Line]:
    compilation.wait([compilation.drafting])
    text = read_text(arguments.pool_tokens + 200_000)
    fresh, old = text[:200_000], text[200_000:]
    looks = Looks(arguments.looks)
    yield from insertions(fresh)
    yield from pools(old, fresh, looks)
    pool = NgramPool()
    pool.add(old[:1_000_000])
    for size in CONTEXTS:
        yield from trees(fresh, size, pool, looks)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pool-tokens", type=int, default=10_000_000)
    parser.add_argument("--looks", type=int, default=400, help="look-ups of each kind")
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    about = {"device": env.cpu_name(), "load_average": os.getloadavg()[0]}
    report = Report(arguments.json, **(about | env.versions()))
    for line in measure(arguments):
        report.add(line)


if __name__ == "__main__":
    main()
