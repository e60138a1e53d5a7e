"""`lookahead-hf chat`: a conversation on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import click

from lookahead_hf import compat
from lookahead_hf.cli.comparison import Stage, run_plain, run_speculative, user
from lookahead_hf.cli.generate import as_data, open_stage
from lookahead_hf.cli.measuring import Call
from lookahead_hf.cli.near_ties import first_difference
from lookahead_hf.cli.parsing import Arguments, command, generation_options
from lookahead_hf.cli.screen import Screen

_EXAMPLES = """\
examples:
  lookahead-hf chat
  lookahead-hf chat --model Qwen/Qwen3-0.6B --dtype bfloat16
  lookahead-hf chat --json < questions.txt > answers.jsonl
"""


class Conversation:
    """The messages so far, the model's cache of them, and the drafters.

    The drafters last as long as the conversation and learn from every turn.
    """

    def __init__(self, stage: Stage, is_plain: bool = False) -> None:
        from lookahead_hf.drafting.sources.ngram import NgramDrafter
        from lookahead_hf.drafting.sources.recycling import RecyclingDrafter

        self._stage, self._is_plain = stage, is_plain
        lasts = not (is_plain or stage.config.drafters or stage.config.options)
        drafters = NgramDrafter(keep=True), RecyclingDrafter(keep=True)
        self._drafters = drafters if lasts else None  # the default ones, which forget nothing
        self._messages: list[dict[str, str]] = []
        self._cache: Any = None
        self._cached: list[int] = []  # the tokens that the cache holds

    def answer(self, message: str) -> tuple[Call, int]:
        """Generate the answer to a message; return it and how many prompt tokens were cached."""
        stage = self._stage
        self._messages += user(message)
        inputs = stage.encode(self._messages)
        prompt = inputs["input_ids"][0].tolist()
        known = self._keep_prefix(prompt)
        inputs[compat.GENERATE_CACHE] = self._cache
        if self._is_plain:
            call = run_plain(stage, inputs)
        else:
            call = run_speculative(stage, inputs, self._drafters)
        self._cached = [*prompt, *call.rows[0]][: self._cache.get_seq_length()]
        text = stage.tokenizer.decode(call.rows[0], skip_special_tokens=True)
        self._messages.append({"role": "assistant", "content": text})
        return call, known

    def _keep_prefix(self, prompt: list[int]) -> int:
        """Shorten the cache to the tokens that `prompt` begins with; return their number.

        At least one prompt token is left for the model to compute.
        """
        from transformers import DynamicCache

        start = prompt[:-1]
        known = first_difference(self._cached, start)
        known = len(start) if known is None else known
        try:
            if known and known < len(self._cached):
                self._cache.crop(known - len(self._cached))
        except (RuntimeError, ValueError):  # a sliding window has already dropped what is needed
            known = 0
        if not known:
            self._cache = DynamicCache(config=self._stage.model.config)
        return known


@command("chat", _EXAMPLES, indent=None)
@generation_options()
@click.option("--plain", is_flag=True, help="without speculation")
def COMMAND(arguments: Arguments, screen: Screen) -> None:
    """Talk to a model; an empty line or Ctrl-D ends.

    Each answer is generated speculatively and shown live. The model's cache and the drafters are
    kept from turn to turn, except drafters of --config. Where stdin is a file, each of its lines
    is a turn.
    """
    import torch

    stage = replace(open_stage(arguments, screen), seed=None)
    conversation = Conversation(stage, arguments.plain)
    torch.manual_seed(arguments.seed)
    for message in _messages(screen):
        call, known = conversation.answer(message)
        screen.result({"prompt": message, "cached_tokens": known, **as_data(call, stage.tokenizer)})
        screen.note(_summary(call, known), "dim")


def _summary(call: Call, known: int) -> str:
    per_step = "" if call.stats is None else f"{call.stats.tokens_per_step:.2f} tokens per step, "
    return f"{call.speed:.1f} tokens/s, {per_step}{known} tokens from the cache"


def _messages(screen: Screen) -> Iterator[str]:
    """Yield the user's messages; an empty one ends them on a terminal, and is skipped in a file."""
    if sys.stdin.isatty():
        screen.note("An empty line or Ctrl-D ends.", "dim")
    while True:
        if sys.stdin.isatty():
            screen.note("\n> ", "bold", end="")
        try:
            line = input().strip()
        except EOFError:
            return
        if line:
            yield line
        elif sys.stdin.isatty():
            return
