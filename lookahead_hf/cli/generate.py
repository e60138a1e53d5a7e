"""`lookahead-hf generate`: one text from one prompt."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from lookahead_hf.cli.comparison import Stage, run_plain, run_speculative
from lookahead_hf.cli.loading import encode_chat, open_model, use_threads
from lookahead_hf.cli.screen import CommandError, Screen

_EXAMPLES = """\
examples:
  lookahead-hf generate "Name three uses of a paper clip"
  lookahead-hf generate --sample 0.7,0.95 --stats < prompt.txt
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "generate",
        help="generate one text and show which tokens were drafted",
        description="Generates one text speculatively and shows it live.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", nargs="?", help="default: what stands on stdin")
    add_generation_options(parser)
    parser.add_argument("--plain", action="store_true", help="without speculation")
    parser.add_argument("--stats", action="store_true", help="print the statistics afterwards")
    parser.set_defaults(run=run)


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    """Options that every generating command takes."""
    parser.add_argument("--model", help="a folder or a hub name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--new-tokens", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--sample", type=_sample, metavar="T,TOP_P", help="default: greedy")
    parser.add_argument("--seed", type=int, default=0, help="for --sample (default: 0)")
    parser.add_argument("--threads", type=int, help="threads of torch (default: torch's choice)")


def _sample(text: str) -> tuple[float, float]:
    temperature, top_p = map(float, text.split(","))
    return temperature, top_p


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
    screen.line(f"\n{len(timed.ids)} tokens, {timed.tokens_per_second:.1f} tokens/s", "dim")
    if arguments.stats and timed.stats is not None:
        screen.line(str(timed.stats))
    return 0
