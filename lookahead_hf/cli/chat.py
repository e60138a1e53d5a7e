"""`lookahead-hf chat`: a conversation on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click

from lookahead_hf.cli.comparison import Stage, Timed, run_plain, run_speculative
from lookahead_hf.cli.generate import as_data, generation_arguments, generation_options
from lookahead_hf.cli.loading import encode_chat, open_model, use_threads
from lookahead_hf.cli.parsing import Arguments, command
from lookahead_hf.cli.screen import Screen
from lookahead_hf.config import DEFAULT_DRAFTERS

_EXAMPLES = """\
examples:
  lookahead-hf chat
  lookahead-hf chat --model Qwen/Qwen3-0.6B --dtype bfloat16
  lookahead-hf chat --json < questions.txt > answers.jsonl
"""


class Conversation:
    """What was said, the cache of it, and what drafts are made from.

    The drafters last as long as the conversation: a turn adds its text to their index of n-grams,
    and to what the model expected after each token.

    Args:
        stage: The model, and what belongs to it.
        is_plain: Whether answers are generated without speculation.
    """

    def __init__(self, stage: Stage, is_plain: bool = False) -> None:
        self._stage = stage
        self._drafters = None if is_plain else _lasting_drafters()
        self._messages: list[dict[str, str]] = []
        self._cache: Any = None
        self._cached: list[int] = []  # the tokens that the cache holds

    def answer(self, said: str) -> tuple[Timed, int]:
        """Generate the answer to a message; also the number of prompt tokens that were cached."""
        stage = self._stage
        self._messages.append({"role": "user", "content": said})
        inputs = encode_chat(stage.model, stage.tokenizer, self._messages)
        prompt = inputs["input_ids"][0].tolist()
        known = self._keep_prefix(prompt)
        inputs["past_key_values"] = self._cache
        if self._drafters is None:
            timed = run_plain(stage, inputs)
        else:
            timed = run_speculative(stage, inputs, self._drafters)
        self._cached = [*prompt, *timed.ids][: self._cache.get_seq_length()]
        text = stage.tokenizer.decode(timed.ids, skip_special_tokens=True)
        self._messages.append({"role": "assistant", "content": text})
        return timed, known

    def _keep_prefix(self, prompt: list[int]) -> int:
        """Let the cache hold what `prompt` begins with, but not all of it; say how much it is."""
        known = _num_same(self._cached, prompt[:-1])
        if not known or not _remove(self._cache, len(self._cached) - known):
            self._cache, known = _empty_cache(self._stage.model), 0
        return known


def _num_same(left: list[int], right: list[int]) -> int:
    """Tokens with which both begin."""
    pairs = enumerate(zip(left, right, strict=False))
    shorter = min(len(left), len(right))
    return next((index for index, (a, b) in pairs if a != b), shorter)


def _remove(cache: Any, count: int) -> bool:
    """Take the last tokens out of a cache, False where it cannot."""
    try:
        if count:
            cache.crop(-count)
    except (RuntimeError, ValueError):  # a window or a recurrent state that has moved on
        return False
    return True


def _empty_cache(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _lasting_drafters() -> tuple[Any, ...]:
    """The default drafters, of which nothing is forgotten between calls."""
    from lookahead_hf.drafting.sources.ngram import NgramDrafter
    from lookahead_hf.drafting.sources.recycling import RecyclingDrafter
    from lookahead_hf.ngram_pool import NumbaMissingError

    try:
        return NgramDrafter(keep=True), RecyclingDrafter(keep=True)
    except NumbaMissingError:
        return DEFAULT_DRAFTERS  # whose names are warned of and left out


def run(arguments: Arguments, screen: Screen) -> int:
    """Answer until the user ends the conversation."""
    import torch

    use_threads(arguments.threads)
    model, tokenizer = open_model(arguments.model, arguments.dtype, screen)
    stage = Stage(model, tokenizer, generation_arguments(arguments), screen)
    conversation = Conversation(stage, arguments.plain)
    torch.manual_seed(arguments.seed)
    for said in _lines(screen):
        timed, known = conversation.answer(said)
        screen.result({"prompt": said, "cached_tokens": known, **as_data(timed, tokenizer)})
        screen.line(_summary(timed, known), "dim")
    return 0


def _summary(timed: Timed, known: int) -> str:
    per_step = "" if timed.stats is None else f"{timed.stats.tokens_per_step:.2f} tokens per step, "
    return f"{timed.tokens_per_second:.1f} tokens/s, {per_step}{known} tokens from the cache"


def _lines(screen: Screen) -> Iterator[str]:
    """What is said; an empty line ends it where people type, and is nothing in a file."""
    while True:
        screen.write("\n> ", "bold")
        try:
            line = input().strip()
        except EOFError:
            return
        if line:
            yield line
        elif sys.stdin.isatty():
            return


COMMAND = command(
    "chat",
    run,
    help="talk to a model; an empty line or Ctrl-D ends",
    about="A conversation, each answer generated speculatively and shown live. The model's cache "
    "and what drafts are made from are kept from turn to turn. Lines of a file are turns too.",
    examples=_EXAMPLES,
    params=[
        *generation_options(),
        click.Option(["--plain"], is_flag=True, help="without speculation"),
    ],
    indent=None,
)
