"""Let several clients ask running servers at once: tokens per second, and the first token's time.

Each client asks for one stream after the other, greedily. The servers take turns, round after
round, so that one rests while the other is asked; the round of median speed counts.

    lookahead-hf serve MODEL --port 8000 --dtype bfloat16
    transformers serve MODEL --port 8001 --dtype bfloat16 --continuous-batching
    python benchmarks/served_load.py --model MODEL --ports 8000,8001 --clients 8
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import common


@dataclass(frozen=True)
class Line:
    """A server; the seconds are those until the first token of an answer."""

    port: int
    tokens_per_second: float
    median_first: float
    longest_first: float


def ask(client: Any, model: str, new_tokens: int, prompt: str) -> tuple[int, float]:
    """Return how many tokens an answer has, and the seconds until the first of them."""
    start = time.perf_counter()
    said = [{"role": "user", "content": prompt}]
    given = {"max_tokens": new_tokens, "temperature": 0, "stream": True}
    first, tokens = 0.0, 0
    for piece in client.chat.completions.create(model=model, messages=said, **given):
        if not first and any(choice.delta.content for choice in piece.choices):
            first = time.perf_counter() - start
        tokens = piece.usage.completion_tokens if piece.usage else tokens
    return tokens, first


def measure(port: int, options: argparse.Namespace, prompts: list[str]) -> tuple[float, ...]:
    """Return a server's tokens per second, and the median and longest time to a first token."""
    from openai import OpenAI

    start, address = time.perf_counter(), f"http://localhost:{port}/v1"
    with (
        OpenAI(base_url=address, api_key="-", max_retries=0) as client,
        ThreadPoolExecutor(options.clients) as clients,
    ):
        one = partial(ask, client, options.model, options.new_tokens)
        answers = list(clients.map(one, prompts))
    seconds = time.perf_counter() - start
    firsts = [first for _, first in answers]
    return sum(count for count, _ in answers) / seconds, statistics.median(firsts), max(firsts)


def main() -> None:
    numbers = {"clients": 8, "requests": 24, "characters": 4000, "new_tokens": 64, "rounds": 3}
    parser = common.parser(__doc__, **numbers)
    parser.add_argument("--ports", type=common.numbers, default=[8000])
    options = common.parsed(parser, clients=2, requests=3, characters=900)
    mixed = chain(*zip(*common.read_prompts(None).values(), strict=False))
    prompts = [each for each in mixed if len(each) <= options.characters]
    prompts = prompts[: options.requests]
    found: dict[int, list[tuple[float, ...]]] = {port: [] for port in options.ports}
    for _ in range(options.rounds):
        for port, rounds in found.items():
            rounds.append(measure(port, options, prompts))
    report = common.Report(options)
    for port, rounds in found.items():
        report.add(Line(port, *sorted(rounds)[len(rounds) // 2]))


if __name__ == "__main__":
    main()
