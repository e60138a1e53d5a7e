"""`lookahead-hf analyze`: what speculation will bring for the user's prompts, and why."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from lookahead_hf.cli import env
from lookahead_hf.cli.analysis.costs import (
    OUR_TOKENS,
    Costs,
    curve_of,
    length_class,
    measure,
    write,
)
from lookahead_hf.cli.analysis.prompts import OUTPUTS, Sample, read_samples
from lookahead_hf.cli.comparison import Stage
from lookahead_hf.cli.loading import (
    load_tokenizer,
    model_name,
    open_model,
    wait_for_functions,
)
from lookahead_hf.cli.measuring import Call
from lookahead_hf.cli.parsing import DTYPE, NEW_FILE, POSITIVE, Arguments, command, model_options
from lookahead_hf.cli.screen import CommandError, PageScreen, Screen
from lookahead_hf.ngram_pool import compilation

if TYPE_CHECKING:
    from lookahead_hf.cli.analysis.estimate import Traced

Prompted = list[tuple[Sample, dict[str, Any]]]
"""Samples, each with its prompt as arguments of `generate`."""

_EXAMPLES = """\
examples:
  lookahead-hf analyze prompts.jsonl --model Qwen/Qwen3-0.6B --dtype bfloat16
  lookahead-hf analyze logged.jsonl --model ./model --references --html report.html
  lookahead-hf analyze logged.jsonl --model ./model --references --costs 0:1,8:1.1,64:1.3

A record: {"prompt": "...", "group": "tickets", "output": "..."}, or "messages" for "prompt".
"""


@command("analyze", _EXAMPLES)
@click.argument("prompts", type=click.Path(path_type=Path))
@click.option("--references", is_flag=True, help="replay the outputs of the file, generate none")
@click.option(
    "--costs",
    callback=curve_of,
    metavar="N:COST,...",
    help="with --references: what a step costs by draft tokens, in plain steps, or 'assumed'; only "
    "the tokenizer is loaded",
)
@click.option("--sample", type=POSITIVE, default=8, show_default=True, help="prompts per group")
@click.option("--html", type=NEW_FILE, help="also write a web page")
@model_options(new_tokens=128)
@DTYPE
def COMMAND(arguments: Arguments, screen: Screen) -> None:
    """Predict what speculation brings for the prompts of a file.

    PROMPTS is a file of JSON records or of one prompt per line. For every group of prompts the
    command says how much faster this machine will generate, why, and with which settings.
    """
    samples = _read(arguments)
    from lookahead_hf.cli.analysis.report import findings, show  # seconds, as it needs torch

    page = PageScreen() if arguments.html else None
    stage = _open(arguments, screen)
    found = findings(*_analyse(stage, samples, arguments))
    about = _about(stage, samples, arguments)
    screen.result({"about": about, "groups": [finding.to_dict() for finding in found]})
    show(found, about, screen)
    if page is not None:
        show(found, about, page)
        arguments.html.write(page.to_html())


def _read(arguments: Arguments) -> list[Sample]:
    if arguments.costs is not None and not arguments.references:
        raise CommandError("--costs needs --references: without outputs the model must generate.")
    samples = read_samples(arguments.prompts, arguments.sample)
    if arguments.references:
        samples = [sample for sample in samples if sample.output]
    if not samples:
        raise CommandError(
            f"{arguments.prompts} holds no outputs: give its records a text "
            f"{' or '.join(f'`{name}`' for name in OUTPUTS)}, or leave out --references."
        )
    return samples


def _open(arguments: Arguments, screen: Screen) -> Stage:
    """Return the model, or None where costs are given, and its tokenizer."""
    if arguments.costs is None:
        model, tokenizer = open_model(arguments, screen)
    else:
        model, tokenizer = None, load_tokenizer(model_name(arguments, screen), "--model")
        import lookahead_hf.drafting.registry  # noqa: F401 (says what there is to compile)

        wait_for_functions(screen, [compilation.drafting])
    return Stage(model, tokenizer, {"max_new_tokens": arguments.new_tokens}, screen)


def _analyse(
    stage: Stage, samples: list[Sample], arguments: Arguments
) -> tuple[list[Traced], dict[int, Costs]]:
    """Return the texts with the steps that they take, and the costs by length of the prompt."""
    from lookahead_hf.cli.analysis.estimate import SETTINGS, shortfall, trace

    prompted: Prompted = [
        (each, stage.encode(each.messages) | {"do_sample": False}) for each in samples
    ]
    costs, probes = _costs(stage, prompted, arguments.costs)
    texts = _texts(stage, prompted, arguments.references)
    if not texts:
        raise CommandError("All outputs have fewer than two tokens: there is nothing to speed up.")
    with stage.screen.task("replaying", len(SETTINGS) * len(texts)) as report:
        trace(probes, costs, OUR_TOKENS, lambda done: None)
        trace(texts, costs, arguments.new_tokens, report)
    for traced in texts:
        same = [other for other in texts if other.text.family == traced.text.family]
        traced.missing = shortfall(probes if arguments.references else same)
    return texts, costs


def _costs(
    stage: Stage, prompted: Prompted, curve: dict[int, float] | None
) -> tuple[dict[int, Costs], list[Traced]]:
    """Return the costs by length of the prompt, and the texts of the calls that measured them."""
    by_class: dict[int, Prompted] = {}
    for sample, inputs in sorted(prompted, key=lambda each: each[1]["input_ids"].shape[1]):
        length = length_class(inputs["input_ids"].shape[1])
        by_class.setdefault(length, []).append((sample, inputs))
    if curve is not None:
        return {each: Costs(plain_step=1.0, steps=curve) for each in by_class}, []
    costs, probes = {}, []
    with stage.screen.task("measuring the costs of steps", len(by_class)) as report:
        for done, (each, members) in enumerate(by_class.items(), 1):
            sample, inputs = members[len(members) // 2]
            costs[each], call = measure(stage.model, inputs)
            probes.append(_traced(stage, sample, inputs, call))
            report(done)
    return costs, probes


def _texts(stage: Stage, prompted: Prompted, references: bool) -> list[Traced]:
    """Return the texts to replay: the file's outputs, or what the model writes speculatively."""
    limit, texts = stage.generation["max_new_tokens"], []
    label = "reading the outputs" if references else "generating"
    with stage.screen.task(label, len(prompted)) as report:
        for done, (sample, inputs) in enumerate(prompted, 1):
            if references:
                ids = stage.tokenizer(sample.output, add_special_tokens=False)["input_ids"]
                end = stage.tokenizer.eos_token_id
                call = Call(0.0, ((*ids, *([] if end is None else [end]))[:limit],))
            else:
                call = write(stage.model, inputs, limit)
            if call.num_tokens > 1:
                texts.append(_traced(stage, sample, inputs, call))
            report(done)
    return texts


def _traced(stage: Stage, sample: Sample, inputs: dict[str, Any], call: Call) -> Traced:
    """Return a text with what the model expects at its positions, if there is a model."""
    from lookahead_hf.cli.analysis.estimate import Traced, likeliest
    from lookahead_hf.cli.analysis.replay import Text

    prompt, output = inputs["input_ids"][0].cpu().numpy(), np.array(call.rows[0])
    expected = likeliest(stage.model, np.concatenate([prompt, output]))
    text = Text(sample.group, 0, prompt, output, *expected)
    return Traced(text, None if call.stats is None else call.stats.budget_histogram)


def _about(stage: Stage, samples: list[Sample], arguments: Arguments) -> dict[str, Any]:
    """Return what the numbers rest on, and a command that measures what they predict."""
    machine = None if stage.model is None else env.machine(stage.model)
    outputs = "those of the file" if arguments.references else "generated"
    basis = f"Greedy, batch 1, up to {arguments.new_tokens} new tokens; outputs are {outputs}. "
    if machine is None:
        basis += (
            "The model did not run. Costs of steps are given, not measured; the time for prompts "
            "is left out, and so are drafts from the model's logits, which calls have as well."
        )
    else:
        basis += "Costs were measured with {model} in {dtype} on {device}.".format(**machine)
        if arguments.references:
            basis += " Drafts from the model's logits are estimated."
    model = f" --model {shlex.quote(arguments.model)}" if arguments.model else ""
    limits = f"{model} --dtype {arguments.dtype} --new-tokens {arguments.new_tokens}"
    file = f"--prompts {shlex.quote(str(arguments.prompts))} --limit {len(samples)}"
    chats = any(sample.is_conversation for sample in samples)
    line = f"lookahead-hf chat{limits}" if chats else f"lookahead-hf bench{limits} {file}"
    return {"file": str(arguments.prompts), "machine": machine, "basis": basis, "command": line}
