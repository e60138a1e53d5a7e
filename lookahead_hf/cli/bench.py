"""`lookahead-hf bench`: plain generate, HF's prompt lookup and ours on the user's own prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from lookahead_hf.cli import env
from lookahead_hf.cli.demo_prompts import PROMPTS
from lookahead_hf.cli.generate import generation_arguments, generation_options
from lookahead_hf.cli.loading import encode_chat, open_model, use_threads, within_positions
from lookahead_hf.cli.measuring import Batch, Run, measure, systems
from lookahead_hf.cli.parsing import Arguments, command, positive
from lookahead_hf.cli.screen import CommandError, Screen
from lookahead_hf.cli.summary import Line, summarize

_EXAMPLES = """\
examples:
  lookahead-hf bench
  lookahead-hf bench --model Qwen/Qwen3-0.6B --dtype bfloat16 --prompts mine.txt
  lookahead-hf bench --prompts tickets.jsonl --field question --limit 20 --json > result.json
"""


def run(arguments: Arguments, screen: Screen) -> int:
    """Measure, and show a table."""
    prompts = _read_prompts(arguments)
    use_threads(arguments.threads)
    model, tokenizer = open_model(arguments.model, arguments.dtype, screen)
    batches, pad = _encode(model, tokenizer, prompts)
    shared = {**generation_arguments(arguments), "pad_token_id": pad}
    about = env.machine(model)
    longest = max(batch.inputs["input_ids"].shape[1] for batch in batches)
    runs: list[Run] = []
    try:
        total = arguments.rounds * len(batches)
        with (
            screen.task("measuring (3 calls per prompt and round)", total, "prompts") as report,
            within_positions(model, longest, arguments.new_tokens),
        ):
            measured = measure(model, batches, systems(), shared, arguments.rounds)
            for done, part in enumerate(measured, 1):
                runs = part
                report(done)
    except KeyboardInterrupt:
        if not runs:
            raise
        screen.line("interrupted: the result is that of a part", "yellow")
    lines = _lines(runs)
    screen.result({"about": about, "lines": [vars(line) for line in lines]})
    _show(lines, about, screen)
    return 0


def _read_prompts(arguments: Arguments) -> list[tuple[str, str]]:
    """Name and text of each prompt."""
    if arguments.prompts is None:
        named = list(PROMPTS.items())
    else:
        try:
            content = arguments.prompts.read_text(encoding="utf-8")
            is_json = arguments.prompts.suffix == ".jsonl"
            texts = _records(content, arguments.field) if is_json else content.splitlines()
            named = [(arguments.prompts.name, text) for text in texts if text.strip()]
        except (OSError, ValueError) as error:
            raise CommandError(f"{arguments.prompts} could not be read: {error}") from error
    if not named:
        raise CommandError(f"There is no prompt in {arguments.prompts}.")
    return named[: arguments.limit]


def _records(content: str, field: str) -> Iterator[str]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        record = json.loads(line)
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"line {number} has no text {field!r}; --field names another")
        yield text


def _encode(model: Any, tokenizer: Any, prompts: list[tuple[str, str]]) -> tuple[list[Batch], int]:
    """A batch of one per prompt, and the pad token."""
    batches = []
    for at, (name, text) in enumerate(prompts):
        inputs = encode_chat(model, tokenizer, [{"role": "user", "content": text}])
        pad = inputs.pop("pad_token_id")
        batches.append(Batch(name, (at,), inputs))
    return batches, pad


def _lines(runs: list[Run]) -> list[Line]:
    lines = summarize(runs)
    is_one = len({line.family for line in lines}) == 2  # itself, and all
    return [line for line in lines if not is_one or line.family != "all"]


def _show(lines: list[Line], about: dict[str, Any], screen: Screen) -> None:
    headers = ["prompts", "", "tokens/s", "ratio", "tokens per step", "identical"]
    rows = [
        [
            line.family,
            line.system,
            f"{line.tokens_per_second:.1f}",
            f"{line.ratio:.2f}",
            f"{line.tokens_per_step:.2f}",
            f"{line.identical * line.texts:.0f} of {line.texts}",
        ]
        for line in lines
    ]
    screen.line(f"\n{about['model']}, {about['dtype']}, {about['device']}")
    screen.table(headers, rows)
    screen.line(
        "Of each prompt the median of its rounds, prefill included. A step is one forward after "
        "the prefill; plain generate makes one token per step. In half precision texts can part "
        "where two tokens are nearly tied."
    )


COMMAND = command(
    "bench",
    run,
    help="time plain, HF prompt lookup and speculative generation on your prompts",
    about="Generates every prompt by plain generate, by transformers' prompt lookup and "
    "speculatively, and compares speeds and texts. Ctrl-C shows what there is.",
    examples=_EXAMPLES,
    params=[
        click.Option(
            ["--prompts"],
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="a prompt per line, or JSON records where the name ends in .jsonl (default: the "
            "two prompts of the demo)",
        ),
        click.Option(["--field"], default="prompt", show_default=True, help="of each JSON record"),
        click.Option(["--limit"], type=positive, metavar="N", help="the first N prompts only"),
        click.Option(["--rounds"], type=positive, default=3, show_default=True),
        *generation_options(new_tokens=128),
    ],
)
