"""`lookahead-hf generate`: one text from one prompt."""

from __future__ import annotations

import sys
from typing import Any

import click

from lookahead_hf.cli.comparison import Stage, Timed, run_plain, run_speculative
from lookahead_hf.cli.loading import encode_chat, open_model
from lookahead_hf.cli.parsing import Arguments, command, generation_arguments, generation_options
from lookahead_hf.cli.screen import CommandError, Screen

_EXAMPLES = """\
examples:
  lookahead-hf generate "Name three uses of a paper clip"
  lookahead-hf generate --sample 0.7,0.95 --stats < prompt.txt
  lookahead-hf generate --json "What is 12 times 12?" > answer.json
"""


@command("generate", _EXAMPLES)
@click.argument("prompt", required=False)
@generation_options()
@click.option("--plain", is_flag=True, help="without speculation")
@click.option("--stats", is_flag=True, help="print the statistics afterwards")
def COMMAND(arguments: Arguments, screen: Screen) -> None:
    """Generate one text and show which tokens were drafted.

    The text is generated speculatively and shown live. Without PROMPT, stdin is the prompt.
    """
    import torch

    prompt = read_prompt(arguments.prompt)
    stage = open_stage(arguments, screen)
    inputs = encode_chat(stage.model, stage.tokenizer, [{"role": "user", "content": prompt}])
    torch.manual_seed(arguments.seed)
    timed = run_plain(stage, inputs) if arguments.plain else run_speculative(stage, inputs)
    screen.result({"prompt": prompt, **as_data(timed, stage.tokenizer)})
    screen.line(f"\n{len(timed.ids)} tokens, {timed.tokens_per_second:.1f} tokens/s", "dim")
    if arguments.stats and timed.stats is not None:
        screen.line(str(timed.stats))


def read_prompt(given: str | None) -> str:
    """Return the prompt of a command, from stdin if none is given.

    Raises:
        CommandError: The prompt is empty.
    """
    prompt = _read_stdin() if given is None else given
    # Bytes that the terminal's encoding lacks arrive as surrogates, which no tokenizer takes.
    prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if not prompt.strip():
        raise CommandError("The prompt is empty: give it as an argument or on stdin.")
    return prompt


def open_stage(arguments: Arguments, screen: Screen) -> Stage:
    """Open the model that a command's options name."""
    model, tokenizer = open_model(arguments.model, arguments.dtype, screen, arguments.threads)
    return Stage(model, tokenizer, generation_arguments(arguments), screen)


def _read_stdin() -> str:
    if sys.stdin.isatty():
        print("Type the prompt; Ctrl-D on a line of its own ends it.", file=sys.stderr)
    return sys.stdin.read()


def as_data(timed: Timed, tokenizer: Any) -> dict[str, Any]:
    """A text and the statistics of its call, as JSON values."""
    return {
        "text": tokenizer.decode(timed.ids, skip_special_tokens=True),
        "num_tokens": len(timed.ids),
        "seconds": timed.seconds,
        "tokens_per_second": timed.tokens_per_second,
        "stats": None if timed.stats is None else timed.stats.to_dict(),
    }
