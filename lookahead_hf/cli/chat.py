"""`lookahead-hf chat`: a conversation on the terminal."""

from __future__ import annotations

import argparse
from typing import Any

from lookahead_hf.cli.comparison import Stage, run_speculative
from lookahead_hf.cli.generate import add_generation_options, generation_arguments
from lookahead_hf.cli.loading import encode_chat, open_model, use_threads
from lookahead_hf.cli.screen import Screen

_EXAMPLES = """\
examples:
  lookahead-hf chat
  lookahead-hf chat --model Qwen/Qwen3-0.6B --dtype bfloat16
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model; an empty line or Ctrl-D ends",
        description="A conversation, each answer generated speculatively and shown live.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_generation_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Answer until the user ends the conversation."""
    import torch

    use_threads(arguments.threads)
    model, tokenizer = open_model(arguments.model, arguments.dtype, screen)
    stage = Stage(model, tokenizer, generation_arguments(arguments), screen)
    torch.manual_seed(arguments.seed)
    messages: list[dict[str, str]] = []
    while said := _read_line(screen):
        messages.append({"role": "user", "content": said})
        timed = run_speculative(stage, encode_chat(model, tokenizer, messages))
        answer = tokenizer.decode(timed.ids, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        assert timed.stats is not None
        steps = timed.stats.tokens_per_step
        screen.line(f"{timed.tokens_per_second:.1f} tokens/s, {steps:.2f} tokens per step", "dim")
    return 0


def _read_line(screen: Screen) -> str:
    screen.write("\n> ", "bold")
    try:
        return input().strip()
    except EOFError:
        return ""
