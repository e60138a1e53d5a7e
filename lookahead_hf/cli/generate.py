"""`lookahead-hf generate`: one text from one prompt."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from lookahead_hf.cli.comparison import Stage, Timed, run_plain, run_speculative
from lookahead_hf.cli.loading import encode_chat, open_model, use_threads
from lookahead_hf.cli.parsing import add_command, positive, sampling
from lookahead_hf.cli.screen import CommandError, Screen

_EXAMPLES = """\
examples:
  lookahead-hf generate "Name three uses of a paper clip"
  lookahead-hf generate --sample 0.7,0.95 --stats < prompt.txt
  lookahead-hf generate --json "What is 12 times 12?" > answer.json
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "generate",
        run,
        help="generate one text and show which tokens were drafted",
        about="Generates one text speculatively and shows it live.",
        examples=_EXAMPLES,
    )
    parser.add_argument("prompt", nargs="?", help="default: what stands on stdin")
    add_generation_options(parser)
    parser.add_argument("--plain", action="store_true", help="without speculation")
    parser.add_argument("--stats", action="store_true", help="print the statistics afterwards")


def add_generation_options(parser: argparse.ArgumentParser, new_tokens: int = 256) -> None:
    """Options that every generating command takes."""
    parser.add_argument("--model", help="a folder or a hub name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument(
        "--new-tokens", type=positive, default=new_tokens, help="default: %(default)s"
    )
    parser.add_argument("--sample", type=sampling, metavar="T,TOP_P", help="default: greedy")
    parser.add_argument("--seed", type=int, default=0, help="for --sample (default: 0)")
    parser.add_argument(
        "--threads", type=positive, help="threads of torch (default: torch's choice)"
    )


def generation_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the options say to `generate`."""
    chosen: dict[str, Any] = {"max_new_tokens": arguments.new_tokens, "do_sample": False}
    if arguments.sample:
        temperature, top_p = arguments.sample
        chosen |= {"do_sample": True, "temperature": temperature, "top_p": top_p}
    return chosen


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Generate one text."""
    import torch

    prompt = arguments.prompt if arguments.prompt is not None else sys.stdin.read()
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


def as_data(timed: Timed, tokenizer: Any) -> dict[str, Any]:
    """A text and what is known of its call, for programs."""
    return {
        "text": tokenizer.decode(timed.ids, skip_special_tokens=True),
        "num_tokens": len(timed.ids),
        "seconds": timed.seconds,
        "tokens_per_second": timed.tokens_per_second,
        "stats": None if timed.stats is None else timed.stats.to_dict(),
    }
