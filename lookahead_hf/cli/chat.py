"""`lookahead-hf chat`: a conversation on the terminal."""

from __future__ import annotations

import argparse
from typing import Any

from lookahead_hf.cli.comparison import Stage, Timed, run_speculative
from lookahead_hf.cli.generate import add_generation_options, as_data, generation_arguments
from lookahead_hf.cli.loading import encode_chat, open_model, use_threads
from lookahead_hf.cli.parsing import add_command
from lookahead_hf.cli.screen import Screen

_EXAMPLES = """\
examples:
  lookahead-hf chat
  lookahead-hf chat --model Qwen/Qwen3-0.6B --dtype bfloat16
  lookahead-hf chat --json < questions.txt > answers.jsonl
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "chat",
        run,
        help="talk to a model; an empty line or Ctrl-D ends",
        about=(
            "A conversation, each answer generated speculatively and shown live. The model's cache "
            "is kept from turn to turn, and drafts come from all that was said."
        ),
        examples=_EXAMPLES,
    )
    add_generation_options(parser)


class Conversation:
    """What was said, and the cache of it.

    The n-gram index of a turn covers its whole prompt, and that is the conversation.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
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
        timed = run_speculative(stage, {**inputs, "past_key_values": self._cache})
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


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Answer until the user ends the conversation."""
    import torch

    use_threads(arguments.threads)
    model, tokenizer = open_model(arguments.model, arguments.dtype, screen)
    conversation = Conversation(Stage(model, tokenizer, generation_arguments(arguments), screen))
    torch.manual_seed(arguments.seed)
    while said := _read_line(screen):
        timed, known = conversation.answer(said)
        assert timed.stats is not None
        screen.result({"prompt": said, "cached_tokens": known, **as_data(timed, tokenizer)})
        screen.line(
            f"{timed.tokens_per_second:.1f} tokens/s, {timed.stats.tokens_per_step:.2f} tokens per "
            f"step, {known} tokens from the cache",
            "dim",
        )
    return 0


def _read_line(screen: Screen) -> str:
    screen.write("\n> ", "bold")
    try:
        return input().strip()
    except EOFError:
        return ""
