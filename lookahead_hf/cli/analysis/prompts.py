"""Reads the user's prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookahead_hf.cli.comparison import user
from lookahead_hf.cli.records import is_record, read_lines
from lookahead_hf.cli.screen import CommandError

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
