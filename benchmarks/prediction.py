"""Time code edits with the old file as `prediction=`, against plain and without the prediction.

The same file is also drafted from as servers do it, by its longest common run with the text.

A small model edits badly, so the edits run backwards: the plain output for a request is the new
file, and undoing one edit in it makes the old file. Undoing restores a name, removes lines that
the edit inserted, inserts lines that it deleted, or restores words that it changed. The old file,
as text, is the prediction; the prompt does not contain it. Files of less than 100 tokens are left
out.

    python benchmarks/prediction.py --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import keyword
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
from peers.common_run import CommonRun
from results import print_lines

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.tools.cli.commands.env import machine
from lookahead_hf.tools.cli.measuring import OURS, PLAIN, Batch, Call, Run, summarize, timed_call

PREDICTED, COMMON_RUN = "with prediction", "with its longest common run"
SPECULATIVE: Any = True

MIN_TOKENS = 100
"""Shorter files are left out."""

REQUESTS = (
    "Write a Python class BankAccount with deposit, withdraw and transfer, and use it.",
    "Write a Python function that reads a CSV file and prints the average of each column.",
    "Write a Python class Stack with push, pop, peek and size, with docstrings.",
    "Write a Python function that checks whether a string is a palindrome, with three tests.",
    "Write a Python class Rectangle with area, perimeter and scale, and print an example.",
    "Write a Python script that counts the words of a text file and prints the ten most frequent.",
    "Write a Python class LinkedList with append, remove and find.",
    "Write a Python function for binary search and one for bubble sort, with examples.",
    "Write a Python class Inventory that adds, removes and lists items with their prices.",
    "Write a Python function that converts temperatures between Celsius, Fahrenheit and Kelvin.",
    "Write an HTML page with a form for name, email and message and a submit button.",
    "Write SQL statements that create tables for books, authors and loans, and fill them.",
)


@dataclass(frozen=True)
class Edit:
    """One request, the new file that the model wrote, and the old file."""

    kind: str
    batch: Batch
    plain: Call
    old: str
    num_changed: int  # lines of the old file that the new one lacks


def rename(text: str, rng: random.Random) -> str:
    """Undo the renaming of a frequent name."""
    names = Counter(re.findall(r"\b[a-z_]{4,}\b", text))
    usable = [name for name, _ in names.most_common() if not keyword.iskeyword(name)]
    name = usable[rng.randrange(min(3, len(usable)))]
    return re.sub(rf"\b{name}\b", f"my_{name}", text)


def insert(text: str, rng: random.Random) -> str:
    """Undo the insertion of one or two lines at two places."""
    lines = text.splitlines(keepends=True)
    for _ in range(2):
        at = rng.randrange(1, len(lines) - 1)
        del lines[at : at + rng.randint(1, 2)]
    return "".join(lines)


def delete(text: str, rng: random.Random) -> str:
    """Undo the deletion of two lines that repeat others with more indentation."""
    lines = text.splitlines(keepends=True)
    for _ in range(2):
        at, source = rng.randrange(1, len(lines)), rng.randrange(1, len(lines))
        lines.insert(at, "  " + lines[source])
    return "".join(lines)


def change(text: str, rng: random.Random) -> str:
    """Undo the change of a word in three lines."""
    lines = text.splitlines(keepends=True)
    with_words = [at for at, line in enumerate(lines) if re.search(r"[a-z]{3,}", line)]
    for at in rng.sample(with_words, min(3, len(with_words))):
        word = rng.choice(re.findall(r"[a-z]{3,}", lines[at]))
        lines[at] = lines[at].replace(word, "previous", 1)
    return "".join(lines)


KINDS: dict[str, Callable[[str, random.Random], str]] = {
    "rename": rename,
    "insert": insert,
    "delete": delete,
    "change": change,
}


def make_edit(model: Any, tokenizer: Any, at: int, request: str, shared: dict[str, Any]) -> Edit:
    """Let the model write the new file, and undo one edit in it."""
    kind = list(KINDS)[at % len(KINDS)]
    batch = Batch(kind, (at,), common.encode(tokenizer, [request]))
    plain = timed_call(model, batch.inputs | shared, 0)
    new = tokenizer.decode(plain.rows[0], skip_special_tokens=True)
    old = KINDS[kind](new, random.Random(at))
    gone = Counter(old.splitlines()) - Counter(new.splitlines())
    return Edit(kind, batch, plain, old, gone.total())


def measure(
    model: Any, tokenizer: Any, edit: Edit, shared: dict[str, Any], rounds: int
) -> list[Run]:
    """Time plain generation, and speculation without and with two uses of the prediction."""
    expected = CommonRun(tokenizer(edit.old, add_special_tokens=False).input_ids)
    ways: dict[str, dict[str, Any]] = {
        PLAIN: {},
        OURS: {"speculative": SPECULATIVE},
        PREDICTED: {"speculative": SPECULATIVE, "prediction": edit.old, "tokenizer": tokenizer},
        COMMON_RUN: {
            "speculative": SpeculativeConfig(drafters=("ngram", "recycling", expected)),
        },
    }
    runs = [Run(edit.kind, name) for name in ways]
    for number in range(rounds):
        for run, extra in zip(runs, ways.values(), strict=True):
            call = edit.plain
            if extra or number:
                call = timed_call(model, edit.batch.inputs | shared | extra, 0)
            run.calls.append(call)
            if extra:
                assert call.stats is not None and call.stats.fallback_reason is None
    return runs


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = common.model_parser(__doc__)
    parser.add_argument("--edits", type=common.positive, default=len(REQUESTS), help="the first N")
    parser.add_argument("--new-tokens", type=common.positive, default=300)
    parser.add_argument("--rounds", type=common.positive, default=3)
    parser.add_argument("--threads", type=common.positive, help="torch's threads")
    parser.add_argument("--json", type=Path, help="write the lines to this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    place = arguments.dtype, arguments.device, arguments.threads
    model, tokenizer = common.load(arguments.model, *place)
    lookahead_hf.enable(model)
    lookahead_hf.warm_up(model, context_length=300, seconds=None)
    shared = {
        "max_new_tokens": arguments.new_tokens,
        "do_sample": False,
        "pad_token_id": tokenizer.pad_token_id,
    }
    runs: list[Run] = []
    for at, request in enumerate(REQUESTS[: arguments.edits]):
        edit = make_edit(model, tokenizer, at, request, shared)
        if edit.plain.num_tokens < MIN_TOKENS:
            print(f"{at + 1} left out: {edit.plain.num_tokens} tokens", file=sys.stderr)
            continue
        measured = measure(model, tokenizer, edit, shared, arguments.rounds)
        runs += measured
        line = next(each for each in summarize(measured) if each.system == PREDICTED)
        print(
            f"{at + 1} {edit.kind}: {line.tokens} tokens, {edit.num_changed} old lines differ, "
            f"{line.tokens_per_step:.2f} tokens per step, {line.ratio:.2f} times plain",
            file=sys.stderr,
        )
    lines = summarize(runs)
    about = machine(model) | {"command": " ".join(sys.argv[1:])}
    print(json.dumps(about))
    print_lines(lines)
    if arguments.json:
        content = {"about": about, "lines": [vars(line) for line in lines]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
