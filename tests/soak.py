"""Let many clients ask one server for some minutes: every text, the memory and the threads hold.

    python -m tests.soak --clients 64 --minutes 15

Requests have random settings, seeds, stop strings, schemas and predictions; some are streams, and
some clients leave. Each finished text has to be the one that the server wrote for the same request
without speculation, while nobody else asked. At the end, the memory that is in use may be 3 % above
that after the first minute, and no thread more may be alive. What is freed counts as gone: glibc
keeps some of it in the heaps of 64 threads.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from lookahead_hf import SpeculativeConfig
from tests.helpers.served import Served, save_ascii_chat, serving
from tests.helpers.soak import resident
from tests.helpers.tiny_chat import DRAFTING

NUM_REQUESTS = 60
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.5, "presence_penalty": 1.0},
    {"logit_bias": {"72": 5.0}, "frequency_penalty": 0.5},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["a", "b"]}}}},
    {"generation_config": json.dumps({"max_new_tokens": 30, "no_repeat_ngram_size": 4})},
    {"generation_config": json.dumps({"max_new_tokens": 20, "num_beams": 2})},
]


def request(chosen: random.Random) -> dict[str, Any]:
    """A random request that has one text."""
    prompt = "".join(chosen.choices("abc xyz=()", k=chosen.randint(1, 60)))
    body = {"max_tokens": chosen.randint(1, 80), "temperature": 0, **chosen.choice(SETTINGS)}
    body |= {"seed": chosen.randrange(2**32), "messages": [{"role": "user", "content": prompt}]}
    if chosen.random() < 0.3:
        body["stop"] = ["".join(chosen.choices("abcdefgh#$%", k=2)) for _ in range(3)]
    if chosen.random() < 0.1:
        body["prediction"] = {"type": "content", "content": prompt}
    return body


class Soak:
    """Clients of one server, and what they have found."""

    def __init__(self, served: Served, seed: int) -> None:
        self.served, self.found = served, Counter[str]()
        self.chosen = random.Random(seed)
        self.asked = [request(self.chosen) for _ in range(NUM_REQUESTS)]
        self.expected = [self.text({**each, "speculative": False}) for each in self.asked]

    def text(self, body: dict[str, Any], leaves_after: int | None = None) -> str | None:
        """The text of an answer; of a stream, None if the client leaves after so many pieces."""
        asked = {"model": self.served.folder, "messages": body["messages"]}
        more = {name: body[name] for name in body if name != "messages"}
        create = self.served.client.chat.completions.create
        if leaves_after is None:
            answer = create(**asked, extra_body=more)
            return str(answer.choices[0].message.content)
        pieces = []
        with create(**asked, extra_body=more, stream=True) as answer:
            for number, chunk in enumerate(answer):
                if number == leaves_after:
                    return None
                pieces += [choice.delta.content or "" for choice in chunk.choices]
        return "".join(pieces)

    def client(self, seed: int, until: float) -> None:
        """Ask until the end."""
        chosen = random.Random(seed)
        while time.monotonic() < until:
            number = chosen.randrange(NUM_REQUESTS)
            streams = chosen.random() < 0.5 and "num_beams" not in str(self.asked[number])
            leaves_after = chosen.choice([1, 5, 1000]) if streams else None
            try:
                text = self.text(self.asked[number], leaves_after)
            except Exception as error:
                self.found[f"{type(error).__name__}: {str(error)[:200]}"] += 1
            else:
                is_right = text in (None, self.expected[number])
                self.found["left" if text is None else "right" if is_right else "wrong"] += 1
                if not is_right:
                    print(f"{self.asked[number]}\n  {text!r}\n  {self.expected[number]!r}")


def main() -> int:
    """Run the clients; return 1 if anything does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    numbers: list[tuple[int, int]] = []

    def measure() -> None:
        numbers.append((resident(), threading.active_count()))

    folder = save_ascii_chat(Path(tempfile.mkdtemp()))
    with serving(folder, SpeculativeConfig(**DRAFTING)) as served:
        soak = Soak(served, options.seed)
        begin, seconds = time.monotonic(), 60 * options.minutes
        first = threading.Timer(min(60.0, seconds / 3), measure)
        last = threading.Timer(seconds - 1, measure)
        first.start()
        last.start()
        with ThreadPoolExecutor(options.clients) as clients:
            for seed in range(options.clients):
                clients.submit(soak.client, seed, begin + seconds)
    (before, threads), (after, more_threads) = numbers
    print(f"{dict(soak.found)}; {before >> 20} MB, then {after >> 20}; {threads} threads", end="")
    print(f", then {more_threads}; at the end {[each.name for each in threading.enumerate()]}")
    is_right = {*soak.found} <= {"right", "left"} and soak.found["right"] > 0
    return int(not (is_right and after <= 1.03 * before and more_threads <= threads + 4))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
