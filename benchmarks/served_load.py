"""Let several clients ask running servers at once: tokens per second, and the first token's time.

Each client asks for one stream after the other, greedily. The servers take turns, round after
round, so that one rests while the other is asked; the round of median speed counts.

    lookahead-hf serve MODEL --port 8000 --dtype bfloat16
    transformers serve MODEL --port 8001 --dtype bfloat16 --continuous-batching
    python benchmarks/served_load.py MODEL --ports 8000 8001 --clients 8
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

import common


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


def measure(port: int, arguments: argparse.Namespace, prompts: list[str]) -> tuple[float, ...]:
    """Return a server's tokens per second, and the median and longest time to a first token."""
    from openai import OpenAI

    start, address = time.perf_counter(), f"http://localhost:{port}/v1"
    with (
        OpenAI(base_url=address, api_key="-", max_retries=0) as client,
        ThreadPoolExecutor(arguments.clients) as clients,
    ):
        one = partial(ask, client, arguments.model, arguments.new_tokens)
        answers = list(clients.map(one, prompts))
    seconds = time.perf_counter() - start
    firsts = [first for _, first in answers]
    return sum(count for count, _ in answers) / seconds, statistics.median(firsts), max(firsts)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="the name or folder that the servers were started with")
    parser.add_argument("--ports", type=common.positive, nargs="+", default=[8000])
    numbers = {"clients": 8, "requests": 24, "characters": 4000, "new-tokens": 64, "rounds": 3}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=common.positive, default=default)
    arguments = parser.parse_args(argv)
    mixed = chain(*zip(*common.read_prompts(None).values(), strict=False))
    prompts = [each for each in mixed if len(each) <= arguments.characters]
    prompts = prompts[: arguments.requests]
    found: dict[int, list[tuple[float, ...]]] = {port: [] for port in arguments.ports}
    for _ in range(arguments.rounds):
        for port, rounds in found.items():
            rounds.append(measure(port, arguments, prompts))
    print("| port | tokens/s | first token, median s | longest s |\n|---|---|---|---|")
    for port, rounds in found.items():
        speed, median, longest = sorted(rounds)[len(rounds) // 2]
        print(f"| {port} | {speed:.1f} | {median:.2f} | {longest:.2f} |")


if __name__ == "__main__":
    main()
