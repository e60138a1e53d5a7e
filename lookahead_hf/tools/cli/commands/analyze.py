"""`lookahead-hf analyze`: what speculation brings for the user's prompts, and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.tools.cli.commands import env
from lookahead_hf.tools.cli.comparison import Stage
from lookahead_hf.tools.cli.loading import open_model
from lookahead_hf.tools.cli.measuring import PLAIN, timed_call
from lookahead_hf.tools.cli.parsing import (
    DTYPE,
    NEW_FILE,
    POSITIVE,
    Arguments,
    command,
    model_options,
)
from lookahead_hf.tools.cli.prompts import Sample, read_samples
from lookahead_hf.tools.cli.report import DEFAULT, SETTINGS, Measured, findings, show
from lookahead_hf.tools.cli.screen import CommandError, PageScreen, Screen

_EXAMPLES = """\
examples:
  lookahead-hf analyze prompts.jsonl --model Qwen/Qwen3-0.6B --dtype bfloat16
  lookahead-hf analyze prompts.jsonl --model ./model --sample 20 --html report.html

A record: {"prompt": "...", "group": "tickets"}, or "messages" for "prompt".
"""


@command("analyze", _EXAMPLES)
@click.argument("prompts", type=click.Path(path_type=Path))
@click.option("--sample", type=POSITIVE, default=8, show_default=True, help="prompts per group")
@click.option("--html", type=NEW_FILE, help="also write a web page")
@model_options(new_tokens=128)
@DTYPE
def COMMAND(arguments: Arguments, screen: Screen) -> None:
    """Measure what speculation brings for the prompts of a file.

    PROMPTS is a file of JSON records or of one prompt per line. Each prompt is generated plainly
    and with a few settings. For every group of prompts the command says how much faster this
    machine generates, why, and with which settings.
    """
    samples = read_samples(arguments.prompts, arguments.sample)
    page = PageScreen() if arguments.html else None
    model, tokenizer = open_model(arguments, screen)
    generation = {"max_new_tokens": arguments.new_tokens, "do_sample": False}
    stage = Stage(model, tokenizer, generation, screen)
    found = findings(_measure(stage, samples))
    machine = env.machine(model)
    basis = (
        f"Greedy, batch 1, up to {arguments.new_tokens} new tokens, one call per prompt and setting"
        ", prompts included; {model} in {dtype} on {device}."
    )
    about = {
        "file": str(arguments.prompts),
        "machine": machine,
        "basis": basis.format(**machine),
    }
    screen.result({"about": about, "groups": [finding.to_dict() for finding in found]})
    show(found, about, screen)
    if page is not None:
        show(found, about, page)
        arguments.html.write(page.to_html())


def _measure(stage: Stage, samples: list[Sample]) -> list[Measured]:
    """Generate from every prompt plainly and with each setting."""
    ways: Mapping[str, dict[str, Any]] = {
        PLAIN: {"speculative": False},
        **{
            name: {"speculative": SpeculativeConfig(**fields, on_fallback="error")}
            for name, fields in SETTINGS.items()
        },
    }
    measured = []
    with stage.screen.task("measuring", len(samples)) as report:
        for done, sample in enumerate(samples):
            inputs = {**stage.encode(sample.messages), **stage.generation}
            if not done:  # the first calls prepare what later ones find
                for name in (PLAIN, DEFAULT):
                    timed_call(stage.model, inputs | ways[name])
            shift = done % len(ways)  # the first way meets colder caches
            turns = [*ways][shift:] + [*ways][:shift]
            calls = {name: timed_call(stage.model, inputs | ways[name]) for name in turns}
            if calls[DEFAULT].num_tokens > 1:
                prompt = inputs["input_ids"][0].tolist()
                measured.append(Measured(sample.group, prompt, calls))
            report(done + 1)
    if not measured:
        raise CommandError("All outputs have fewer than two tokens: there is nothing to speed up.")
    return measured
