"""`lookahead-hf generate`: one text from one prompt."""

from __future__ import annotations

import sys
from typing import Any

import click

from lookahead_hf.cli.comparison import Stage, Timed, run_plain, run_speculative
from lookahead_hf.cli.loading import encode_chat, open_model, use_threads
from lookahead_hf.cli.parsing import Arguments, Sampling, command, positive
from lookahead_hf.cli.screen import CommandError, Screen

DTYPES = ("float32", "bfloat16", "float16")

_EXAMPLES = """\
examples:
  lookahead-hf generate "Name three uses of a paper clip"
  lookahead-hf generate --sample 0.7,0.95 --stats < prompt.txt
  lookahead-hf generate --json "What is 12 times 12?" > answer.json
"""


def generation_options(new_tokens: int = 256) -> list[click.Parameter]:
    """Options that every generating command takes."""
    dtypes = click.Choice(DTYPES)
    return [
        click.Option(["--model"], help="a folder or a hub name (default: SmolLM2-135M-Instruct)"),
        click.Option(["--dtype"], type=dtypes, default="float32", show_default=True),
        click.Option(["--new-tokens"], type=positive, default=new_tokens, show_default=True),
        click.Option(["--sample"], type=Sampling(), help="default: greedy"),
        click.Option(["--seed"], type=int, default=0, show_default=True, help="for --sample"),
        click.Option(["--threads"], type=positive, help="threads of torch (default: its choice)"),
    ]


def generation_arguments(arguments: Arguments) -> dict[str, Any]:
    """What the options say to `generate`."""
    chosen: dict[str, Any] = {"max_new_tokens": arguments.new_tokens, "do_sample": False}
    if arguments.sample:
        temperature, top_p = arguments.sample
        chosen |= {"do_sample": True, "temperature": temperature, "top_p": top_p}
    return chosen


def run(arguments: Arguments, screen: Screen) -> int:
    """Generate one text."""
    import torch

    prompt = _read_prompt() if arguments.prompt is None else arguments.prompt
    if not prompt.strip():
        raise CommandError("The prompt is empty: give it as an argument or on stdin.")
    use_threads(arguments.threads)
    model, tokenizer = open_model(arguments.model, arguments.dtype, screen)
    stage = Stage(model, tokenizer, generation_arguments(arguments), screen)
    inputs = encode_chat(model, tokenizer, [{"role": "user", "content": prompt}])
    torch.manual_seed(arguments.seed)
    timed = run_plain(stage, inputs) if arguments.plain else run_speculative(stage, inputs)
    screen.result({"prompt": prompt, **as_data(timed, tokenizer)})
    screen.line(f"\n{len(timed.ids)} tokens, {timed.tokens_per_second:.1f} tokens/s", "dim")
    if arguments.stats and timed.stats is not None:
        screen.line(str(timed.stats))
    return 0


def _read_prompt() -> str:
    if sys.stdin.isatty():
        print("Type the prompt; Ctrl-D on a line of its own ends it.", file=sys.stderr)
    return sys.stdin.read()


def as_data(timed: Timed, tokenizer: Any) -> dict[str, Any]:
    """A text and what is known of its call, for programs."""
    return {
        "text": tokenizer.decode(timed.ids, skip_special_tokens=True),
        "num_tokens": len(timed.ids),
        "seconds": timed.seconds,
        "tokens_per_second": timed.tokens_per_second,
        "stats": None if timed.stats is None else timed.stats.to_dict(),
    }


COMMAND = command(
    "generate",
    run,
    help="generate one text and show which tokens were drafted",
    about="Generates one text speculatively and shows it live. Without PROMPT it is read from "
    "stdin.",
    examples=_EXAMPLES,
    params=[
        click.Argument(["prompt"], required=False),
        *generation_options(),
        click.Option(["--plain"], is_flag=True, help="without speculation"),
        click.Option(["--stats"], is_flag=True, help="print the statistics afterwards"),
    ],
)
