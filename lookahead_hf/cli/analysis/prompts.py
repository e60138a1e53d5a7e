"""Read the user's prompts and, where the file has them, their outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookahead_hf.cli.screen import CommandError

OUTPUTS = ("reference", "output", "completion")
GROUPS = ("group", "family")
UNGROUPED = "all prompts"

_EXPECTED = 'Write one record per line, such as {"prompt": "...", "output": "...", "group": "..."}.'


@dataclass(frozen=True)
class Sample:
    """A prompt as the messages of a conversation, and what was written for it, if that is known."""

    group: str
    messages: tuple[dict[str, str], ...]
    output: str | None = None


def read_samples(file: Path, limit: int) -> list[Sample]:
    """Return at most `limit` prompts of each group, spread evenly over the file, in its order.

    Args:
        file: JSON records, one per line, where the name ends in .jsonl or the first line is an
            object; else every line that is not blank is a prompt.
        limit: The most prompts of a group.

    Raises:
        CommandError: The file cannot be read, a line is no record of a prompt, or none has one.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{file} cannot be read ({error}): name a text file in UTF-8.") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise CommandError(f"{file} has no prompt. {_EXPECTED}")
    if file.suffix == ".jsonl" or numbered[0][1].lstrip().startswith("{"):
        samples = [_sample(line, f"{file}, line {number}") for number, line in numbered]
    else:
        samples = [Sample(UNGROUPED, _asked(line)) for _, line in numbered]
    return [samples[at] for at in sorted(_spread(samples, limit))]


def _spread(samples: list[Sample], limit: int) -> Iterator[int]:
    """Indices of the samples to take."""
    for group in dict.fromkeys(sample.group for sample in samples):
        own = [at for at, sample in enumerate(samples) if sample.group == group]
        step = max(1.0, len(own) / limit)
        yield from (own[int(number * step)] for number in range(min(limit, len(own))))


def _sample(line: str, where: str) -> Sample:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise CommandError(f"{where} is not JSON ({error}). {_EXPECTED}") from None
    if not isinstance(record, dict):
        raise CommandError(f"{where} is not a JSON object. {_EXPECTED}")
    messages = _messages(record, where)
    output = next((record[name] for name in OUTPUTS if record.get(name) is not None), None)
    if messages[-1]["role"] == "assistant":  # the conversation holds its own answer
        *messages, last = messages
        output = last["content"] if output is None else output
    if not messages or not (output is None or isinstance(output, str)):
        raise CommandError(f"{where} has no prompt, or an output that is no text. {_EXPECTED}")
    group = next((record[name] for name in GROUPS if record.get(name) is not None), UNGROUPED)
    return Sample(str(group), tuple(messages), output)


def _messages(record: dict[str, Any], where: str) -> list[dict[str, str]]:
    """The conversation of a record.

    Raises:
        CommandError: The record has none, or one that is not made of texts.
    """
    prompt, messages = record.get("prompt"), record.get("messages")
    if isinstance(prompt, str) and prompt.strip():
        return list(_asked(prompt))
    if not isinstance(messages, list) or not messages:
        keys = ", ".join(record) or "nothing"
        raise CommandError(f"{where} has {keys}, but no text `prompt` and no list `messages`.")
    for message in messages:
        is_message = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not (is_message and isinstance(message.get("content"), str)):
            raise CommandError(f"{where}: every message needs a `role` and a text as `content`.")
    return messages


def _asked(prompt: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": prompt},)
