"""Prompts of the commands: those of the demo, of files, and of an analysis."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookahead_hf.tools.cli.comparison import user
from lookahead_hf.tools.cli.screen import CommandError

_FUNCTION = '''\
def monthly_report(orders, month):
    """Sum the orders of one month by customer."""
    totals = {}
    for order in orders:
        if order["month"] != month:
            continue
        customer = order["customer"]
        amount = order["quantity"] * order["price"]
        totals[customer] = totals.get(customer, 0) + amount
    lines = []
    for customer, amount in sorted(totals.items()):
        lines.append(f"{customer}: {amount:.2f}")
    return "\\n".join(lines)'''

_PASSAGE = (
    "The lighthouse of Kullen stands on a ridge above the sea in the south of Sweden. The first "
    "fire on this ridge was lit in 1561 by the astronomer Tycho Brahe, who was paid by the Danish "
    "king to keep it burning through the winter. The present tower was designed by Magnus "
    "Dahlander and was lit for the first time in the autumn of 1900. It is only 15 metres high, "
    "but because the ridge is steep the light stands 78.5 metres above the water, which makes it "
    "the highest placed lighthouse in the country. The lens is the largest in Scandinavia and can "
    "be seen from a distance of 27 nautical miles. The lighthouse became automatic in 1979, and "
    "the keepers left."
)

PROMPTS = {
    "code edit": (
        "Rename the variable `amount` to `value` in this function and print the whole function.\n\n"
        f"```python\n{_FUNCTION}\n```"
    ),
    "questions": (
        f"{_PASSAGE}\n\nWho designed the present tower, how high does the light stand above the "
        "water, and when did the lighthouse become automatic?"
    ),
}


def read_lines(file: Path) -> list[tuple[str, str]]:
    """Return the lines of a file that are not blank, each with its place, or CommandError."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        message = f"{file} cannot be read ({reason}): name a text file in UTF-8."
        raise CommandError(message) from None
    return [(f"{file}, line {at}", line) for at, line in enumerate(lines, 1) if line.strip()]


def is_record(file: Path, line: str) -> bool:
    return file.suffix == ".jsonl" or line.lstrip().startswith("{")


def text_of(record: str | bytes, field: str, where: str) -> str:
    """Return a field of a JSON record; dots in its name lead into nested objects.

    ValueError, which names the place `where`, if there is no such field with a text.
    """
    try:
        value = json.loads(record)
    except ValueError as error:
        raise ValueError(f"{where}: this is not JSON ({error})") from error
    for name in field.split("."):
        if not isinstance(value, dict) or name not in value:
            known = ", ".join(value) if isinstance(value, dict) else f"a {type(value).__name__}"
            raise ValueError(f"{where}: no field {name!r}, only {known}; --field names another")
        value = value[name]
    if not isinstance(value, str):
        raise ValueError(f"{where}: the field {field!r} is not a text; --field names another")
    return value


GROUPS = ("group", "family")
UNGROUPED = "all prompts"

_EXPECTED = 'Write one record per line, such as {"prompt": "...", "group": "..."}.'


@dataclass(frozen=True)
class Sample:
    """A prompt as the messages of a conversation."""

    group: str
    messages: tuple[dict[str, str], ...]


def read_samples(file: Path, limit: int) -> list[Sample]:
    """Return at most `limit` prompts of each group, spread evenly over the file, in its order.

    A line is a JSON record if it begins with a brace or the file's name ends in .jsonl;
    CommandError if it is no record of a prompt, or if the file has none.
    """
    lines = read_lines(file)
    if not lines:
        raise CommandError(f"{file} has no prompt. {_EXPECTED}")
    samples = [
        _sample(line, where) if is_record(file, line) else Sample(UNGROUPED, tuple(user(line)))
        for where, line in lines
    ]
    chosen: list[int] = []
    for group in {sample.group for sample in samples}:
        own = [at for at, sample in enumerate(samples) if sample.group == group]
        step = max(1.0, len(own) / limit)
        chosen += [own[int(number * step)] for number in range(min(limit, len(own)))]
    return [samples[at] for at in sorted(chosen)]


def _sample(line: str, where: str) -> Sample:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise CommandError(f"{where} is not JSON ({error}). {_EXPECTED}") from None
    if not isinstance(record, dict):
        raise CommandError(f"{where} is not a JSON object. {_EXPECTED}")
    prompt, messages = record.get("prompt"), record.get("messages")
    if isinstance(prompt, str) and prompt.strip():
        messages = user(str(prompt))
    elif not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        raise CommandError(
            f"{where} has neither a text `prompt` nor a list `messages` of records with `role` and "
            f"`content`, both texts. {_EXPECTED}"
        )
    if messages[-1]["role"] == "assistant":  # the conversation holds its own answer
        messages = messages[:-1]
    if not messages:
        raise CommandError(f"{where} has an answer but no question. {_EXPECTED}")
    group = next((record[name] for name in GROUPS if record.get(name) is not None), UNGROUPED)
    return Sample(str(group), tuple(messages))


def _is_message(value: Any) -> bool:
    parts = [value.get("role"), value.get("content")] if isinstance(value, dict) else [None]
    return all(isinstance(part, str) for part in parts)
