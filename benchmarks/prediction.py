"""Time code edits with the old file as `prediction=`, against plain and without the prediction.

A small model edits badly, so the edits run backwards: the plain output for a request is the new
file, and undoing one edit in it makes the old file. Undoing restores a name, removes lines that
the edit inserted, inserts lines that it deleted, or restores words that it changed. The old file,
as text, is the prediction; the prompt does not contain it. Files of less than 100 tokens are left
out.

    python benchmarks/prediction.py --dtype bfloat16
"""

from __future__ import annotations

import keyword
import random
import re
import sys
from collections import Counter
from collections.abc import Callable

import common

import lookahead_hf
from lookahead_hf.tools.cli.commands.env import machine
from lookahead_hf.tools.cli.measuring import OURS, PLAIN, Batch, Run, measure, summarize, timed_call

PREDICTED = "with prediction"

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


def main() -> None:
    parser = common.parser(__doc__, edits=len(REQUESTS), new_tokens=300, rounds=3)
    options = common.parsed(parser, edits=1, new_tokens=MIN_TOKENS)
    model, tokenizer = common.load(options.model, options.dtype, options.device)
    lookahead_hf.enable(model)
    lookahead_hf.warm_up(model, context_length=300, seconds=None)
    shared = common.greedy(tokenizer, options)
    report, runs = common.Report(options, **machine(model)), list[Run]()
    for at, request in enumerate(REQUESTS[: options.edits]):
        kind = list(KINDS)[at % len(KINDS)]
        batch = Batch(kind, (at,), common.encode(tokenizer, [request]))
        plain = timed_call(model, batch.inputs | shared, 0)
        if plain.num_tokens < MIN_TOKENS:
            print(f"{at + 1} left out: {plain.num_tokens} tokens", file=sys.stderr)
            continue
        new = tokenizer.decode(plain.rows[0], skip_special_tokens=True)
        predicted = {"prediction": KINDS[kind](new, random.Random(at)), "tokenizer": tokenizer}
        ours = {"speculative": True}
        ways = {PLAIN: {}, OURS: ours, PREDICTED: ours | predicted}
        *_, measured = measure(model, [batch], ways, shared, options.rounds)
        runs += measured
    for line in summarize(runs):
        report.add(line)
    report.end()


if __name__ == "__main__":
    main()
