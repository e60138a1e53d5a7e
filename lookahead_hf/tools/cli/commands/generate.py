"""`lookahead-hf generate`: texts from prompts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from lookahead_hf.tools.cli.comparison import Stage, run_plain, run_speculative
from lookahead_hf.tools.cli.loading import load, open_model
from lookahead_hf.tools.cli.measuring import Call
from lookahead_hf.tools.cli.parsing import (
    BATCH_SIZE,
    FILE,
    Arguments,
    command,
    generation_arguments,
    generation_options,
    with_pool,
)
from lookahead_hf.tools.cli.screen import CommandError, Screen, check_installed

_EXAMPLES = """\
examples:
  lookahead-hf generate "Name three uses of a paper clip"
  lookahead-hf generate --temperature 0.7 --top-p 0.95 --stats < prompt.txt > answer.txt
  lookahead-hf generate --prediction old.py "Rename x to y in this file: ..." > new.py
  lookahead-hf generate --json "What is 12 times 12?" > answer.json
  lookahead-hf generate --json-schema person.json "Who wrote the first program?"
"""


@command("generate", _EXAMPLES)
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@generation_options()
@BATCH_SIZE
@click.option("--json-schema", type=FILE, help="the texts are JSON of the schema in this file")
@click.option("--plain", is_flag=True, help="without speculation")
@click.option("--stats", is_flag=True, help="print the statistics afterwards")
def COMMAND(arguments: Arguments, screen: Screen) -> None:
    """Generate a text from each prompt.

    Each text is generated speculatively and shown live; on a terminal, tokens that were drafted are
    coloured. Without PROMPT, stdin is the prompt.
    """
    prompts = [read_prompt(prompt) for prompt in arguments.prompts or (None,)]
    schema = read_schema(arguments.json_schema)
    stage = open_stage(arguments, screen, warms_up=False, drafts=not arguments.plain)
    run = run_plain if arguments.plain else run_speculative
    for at in range(0, len(prompts), arguments.batch_size):
        batch = prompts[at : at + arguments.batch_size]
        call = run(stage, {**stage.encode(*batch), **obeying(schema, stage.tokenizer)})
        for row, prompt in enumerate(batch):
            screen.result({"prompt": prompt, **as_data(call, stage.tokenizer, row)})
        screen.note(f"\n{call.num_tokens} tokens, {call.speed:.1f} tokens/s", "dim")
        if arguments.stats and call.stats is not None:
            screen.note(str(call.stats))


def read_prompt(given: str | None) -> str:
    """Return the prompt of a command, from stdin if none is given; CommandError if it is empty."""
    if given is None and sys.stdin.isatty():
        print("Type the prompt; Ctrl-D on a line of its own ends it.", file=sys.stderr)
    prompt = sys.stdin.read() if given is None else given
    # Bytes that the terminal's encoding lacks arrive as surrogates, which no tokenizer takes.
    prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if not prompt.strip():
        raise CommandError("The prompt is empty: give it as an argument or on stdin.")
    return prompt


def read_schema(file: Path | None) -> str | None:
    """Return the text of a JSON schema, None without a file; CommandError without xgrammar."""
    if file is None:
        return None
    check_installed("--json-schema", ("xgrammar",), "structured")
    return read_text(file)


def read_text(file: Path) -> str:
    """Return the text of a file; CommandError if it is not in UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(f"{file} is not text in UTF-8: {error}") from error


def obeying(schema: str | None, tokenizer: Any) -> dict[str, Any]:
    """Return the arguments of `generate` for texts of a schema; CommandError if it is wrong."""
    if schema is None:
        return {}
    from lookahead_hf import structured

    try:
        return {"logits_processor": [structured.json_schema(schema, tokenizer)]}
    except ValueError as error:
        raise CommandError(str(error)) from error


def open_stage(
    arguments: Arguments, screen: Screen, warms_up: bool = True, drafts: bool = True
) -> Stage:
    """Open the model and the assistant that a command's options name; see `open_model`."""
    config = with_pool(arguments.config, arguments.pool)  # a bad file fails before the model loads
    model, tokenizer = open_model(arguments, screen, warms_up, drafts)
    drafting = {"speculative": config, "speculative_tokenizer": tokenizer}
    if arguments.prediction:
        drafting["prediction"] = read_text(arguments.prediction)
    if name := arguments.assistant:
        assistant, its_tokenizer = load(name, "--assistant", arguments, screen)
        drafting |= {"assistant_model": assistant, "assistant_tokenizer": its_tokenizer}
    generation = generation_arguments(arguments)
    return Stage(model, tokenizer, generation, screen, drafting, arguments.seed)


def as_data(call: Call, tokenizer: Any, row: int = 0) -> dict[str, Any]:
    """Return a text and the statistics of its call, as JSON values."""
    return {
        "text": tokenizer.decode(call.rows[row], skip_special_tokens=True),
        "num_tokens": len(call.rows[row]),
        "seconds": call.seconds,
        "tokens_per_second": call.speed,
        "stats": None if call.stats is None else call.stats.to_dict(),
    }
