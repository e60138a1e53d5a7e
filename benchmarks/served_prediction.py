"""Send code edits to a running `lookahead-hf serve`, without and with the old file as prediction.

The edits are those of benchmarks/prediction.py: the server writes the new file plainly, and undoing
an edit in it makes the old file. Then the same request is answered speculatively, once without a
prediction and once with the old file. Requests go through the client of OpenAI, which the extra
`[serve]` installs. Forwards, the prompt's included, are those that the server reports.

    lookahead-hf serve MODEL --port 8000 --dtype float32
    python benchmarks/served_prediction.py MODEL --url http://localhost:8000/v1
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

import common
from prediction import KINDS, MIN_TOKENS, REQUESTS


@dataclass(frozen=True)
class Answer:
    """What the server answered."""

    text: str
    num_tokens: int
    forwards: int
    seconds: float


def ask(client: Any, arguments: argparse.Namespace, request: str, **fields: Any) -> Answer:
    """Let the server answer a request greedily; `fields` are further ones of the request."""
    start = time.perf_counter()
    answer = client.chat.completions.create(
        model=arguments.model,
        messages=[{"role": "user", "content": request}],
        temperature=0,
        max_tokens=arguments.new_tokens,
        **fields,
    )
    seconds = time.perf_counter() - start
    num_tokens = answer.usage.completion_tokens
    forwards = num_tokens  # of a plain answer, which has no metrics
    if metrics := getattr(answer, "metrics", None):
        counts = metrics["speculative_decoding"]
        assert "fallback_reason" not in counts, counts["fallback_reason"]
        forwards = 1 + counts["num_spec_steps"]
    return Answer(answer.choices[0].message.content, num_tokens, forwards, seconds)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="the name or folder that the server was started with")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--edits", type=common.positive, default=len(REQUESTS), help="the first N")
    parser.add_argument("--new-tokens", type=common.positive, default=220)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    from openai import OpenAI

    arguments = parse_arguments(argv)
    client = OpenAI(base_url=arguments.url, api_key="-", max_retries=0)
    print("| edit | tokens | forwards without | with | fewer | seconds, plain | without | with |")
    print("|---|---|---|---|---|---|---|---|")
    for at, request in enumerate(REQUESTS[: arguments.edits]):
        kind = list(KINDS)[at % len(KINDS)]
        plain = ask(client, arguments, request, extra_body={"speculative": False})
        if plain.num_tokens < MIN_TOKENS:
            print(f"{at + 1} left out: {plain.num_tokens} tokens", file=sys.stderr)
            continue
        old = KINDS[kind](plain.text, random.Random(at))
        without = ask(client, arguments, request)
        given = {"prediction": {"type": "content", "content": old}}
        predicted = ask(client, arguments, request, **given)
        same = plain.text == without.text == predicted.text
        print(
            f"| {at + 1}, {kind}{'' if same else ', other text'} | {plain.num_tokens} "
            f"| {without.forwards} | {predicted.forwards} "
            f"| {without.forwards / predicted.forwards:.1f} "
            f"| {plain.seconds:.2f} | {without.seconds:.2f} | {predicted.seconds:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
