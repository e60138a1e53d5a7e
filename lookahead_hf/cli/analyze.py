"""`lookahead-hf analyze`: what speculation will bring for the user's prompts, and why."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from lookahead_hf.cli import env
from lookahead_hf.cli.loading import encode_chat, load_tokenizer, open_model
from lookahead_hf.cli.parsing import DTYPES, POSITIVE, Arguments, command, model_options
from lookahead_hf.cli.real_model import ensure_demo_model
from lookahead_hf.cli.screen import CommandError, Screen

if TYPE_CHECKING:
    from lookahead_hf.cli.analysis.costs import Costs, Written
    from lookahead_hf.cli.analysis.estimate import Traced
    from lookahead_hf.cli.analysis.prompts import Sample
    from lookahead_hf.cli.analysis.replay import Text
    from lookahead_hf.cli.analysis.report import Finding

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
    callback=lambda _, __, value: _curve(value),
    metavar="N:COST,...",
    help="with --references: cost of a step by draft tokens, in plain steps, or 'assumed'; only "
    "the tokenizer is loaded then",
)
@click.option("--sample", type=POSITIVE, default=8, show_default=True, help="prompts per group")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="also a web page")
@model_options(new_tokens=128)
@click.option("--dtype", type=DTYPES, default="float32", show_default=True)
def COMMAND(arguments: Arguments, screen: Screen) -> None:
    """Predict what speculation brings for the prompts of a file.

    PROMPTS is a file of JSON records or of one prompt per line. For every group of prompts the
    command says how much faster this machine will generate, why, and with which settings.
    """
    from lookahead_hf.cli.analysis import html

    samples = _samples(arguments)
    room = Room.opened(arguments, screen)
    found, about = _analyse(room, samples, arguments)
    screen.result({"about": about, "groups": [finding.to_dict() for finding in found]})
    _show(found, about, screen)
    if arguments.html:
        try:
            arguments.html.write_text(html.page(found, about), encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{arguments.html} cannot be written: {error}") from error
        screen.line(f"\nwritten: {arguments.html}", "dim")


def _curve(value: str | None) -> dict[int, float] | None:
    from lookahead_hf.cli.analysis.costs import curve_of

    try:
        return None if value is None else curve_of(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is not a curve: write pairs such as 0:1,8:1.2,64:2.5, where 0 is a step "
            "without drafts, or 'assumed'"
        ) from None


def _samples(arguments: Arguments) -> list[Sample]:
    from lookahead_hf.cli.analysis.prompts import OUTPUTS, read_samples

    if arguments.costs is not None and not arguments.references:
        raise CommandError("--costs needs --references: without outputs the model must generate.")
    samples = read_samples(arguments.prompts, arguments.sample)
    if arguments.references:
        samples = [sample for sample in samples if sample.output]
        if not samples:
            raise CommandError(
                f"{arguments.prompts} holds no outputs: give the records a text named "
                f"{', '.join(OUTPUTS[:-1])} or {OUTPUTS[-1]}, or leave --references out."
            )
    return samples


@dataclass(frozen=True)
class Room:
    """The model, if it is loaded, with its tokenizer, the screen and the longest output."""

    model: Any  # None where only the tokenizer is there
    tokenizer: Any
    screen: Screen
    new_tokens: int

    @classmethod
    def opened(cls, arguments: Arguments, screen: Screen) -> Room:
        """Load what the options ask for."""
        if arguments.costs is not None:
            from lookahead_hf.ngram_pool import compile_now

            with screen.task("loading the tokenizer and compiling (once per installation)"):
                tokenizer = load_tokenizer(
                    arguments.model or str(ensure_demo_model(screen)), "--model"
                )
                compile_now()
            return cls(None, tokenizer, screen, arguments.new_tokens)
        opened = open_model(arguments.model, arguments.dtype, screen, arguments.threads)
        return cls(*opened, screen, arguments.new_tokens)

    def encode(self, sample: Sample) -> dict[str, Any]:
        """The prompt as arguments of `generate`: `input_ids` and more, [1, columns]."""
        model = self.model or SimpleNamespace(device="cpu")
        return encode_chat(model, self.tokenizer, list(sample.messages)) | {"do_sample": False}

    def write(self, inputs: dict[str, Any], new_tokens: int) -> Written:
        """Generate speculatively.

        Raises:
            CommandError: The model's calls cannot be speculated.
        """
        import lookahead_hf
        from lookahead_hf.cli.analysis.costs import Written
        from lookahead_hf.fallback import SpeculationFallbackError

        config = lookahead_hf.SpeculativeConfig(on_fallback="error")
        try:
            output = self.model.generate(**inputs, max_new_tokens=new_tokens, speculative=config)
        except SpeculationFallbackError as error:
            raise CommandError(f"{error}\n`lookahead-hf env` lists all reasons.") from error
        stats = lookahead_hf.last_stats(self.model)
        return Written(output[0, inputs["input_ids"].shape[1] :].cpu().numpy(), stats)

    def text(self, number: int, sample: Sample, inputs: dict[str, Any], output: Any) -> Text:
        """A text with what the model expects at its positions, if there is a model."""
        from lookahead_hf.cli.analysis.estimate import likeliest, nothing_expected
        from lookahead_hf.cli.analysis.replay import Text

        prompt = inputs["input_ids"][0].cpu().numpy()
        tokens = np.concatenate([prompt, output])
        if self.model is None:
            expected = nothing_expected(len(tokens))
        else:
            expected = likeliest(self.model, tokens)
        return Text(sample.group, number, prompt, output, *expected)

    def reference(self, sample: Sample) -> np.ndarray:
        """The token ids of a given output, with the end of the text, [tokens]."""
        ids = self.tokenizer(sample.output, add_special_tokens=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        ends = [] if end is None else [end]
        return np.array([*ids, *ends][: self.new_tokens], np.int64)


def _analyse(
    room: Room, samples: list[Sample], arguments: Arguments
) -> tuple[list[Finding], dict[str, Any]]:
    """What is expected of every group, and what the numbers rest on."""
    from lookahead_hf.cli.analysis.costs import OUR_TOKENS
    from lookahead_hf.cli.analysis.estimate import shortfall, trace
    from lookahead_hf.cli.analysis.report import findings

    inputs = [room.encode(sample) for sample in samples]
    costs, probes = _costs(room, samples, inputs, arguments.costs)
    texts = _texts(room, samples, inputs, arguments.references)
    with room.screen.task("replaying", 4 * len(texts), "replays") as report:
        trace(probes, costs, OUR_TOKENS, lambda done: None)
        trace(texts, costs, room.new_tokens, report)
    for traced in texts:
        same = [other for other in texts if other.text.family == traced.text.family]
        traced.missing = shortfall(probes if arguments.references else same)
    about = {
        "file": str(arguments.prompts),
        "outputs": "of the file" if arguments.references else "generated",
        "costs": "measured" if room.model is not None else "assumed, prompts left out",
        "max_new_tokens": room.new_tokens,
        "command": _command(arguments),
        "machine": None if room.model is None else env.machine(room.model),
    }
    return findings(texts, costs, room.model is not None), about


def _costs(
    room: Room,
    samples: list[Sample],
    inputs: list[dict[str, Any]],
    curve: dict[int, float] | None,
) -> tuple[dict[int, Costs], list[Traced]]:
    """Costs by length of the prompt, and the texts of the calls that measured them."""
    from lookahead_hf.cli.analysis.costs import OUR_TOKENS, Costs, length_class, measure
    from lookahead_hf.cli.analysis.estimate import Traced

    by_class: dict[int, list[int]] = {}
    for at in sorted(range(len(inputs)), key=lambda at: inputs[at]["input_ids"].shape[1]):
        by_class.setdefault(length_class(inputs[at]["input_ids"].shape[1]), []).append(at)
    if curve is not None:
        return {each: Costs(plain_step=1.0, steps=curve) for each in by_class}, []
    costs, probes = {}, []
    with room.screen.task("measuring the costs of steps", len(by_class), "lengths") as report:
        for done, (each, members) in enumerate(by_class.items(), 1):
            middle = members[len(members) // 2]
            prompt = inputs[middle]
            costs[each], written = measure(
                room.model, prompt, lambda given: room.write(given, OUR_TOKENS)
            )
            text = room.text(middle, samples[middle], prompt, written[0].output)
            probes.append(Traced(text, written[0].stats.budget_histogram))
            report(done)
    return costs, probes


def _texts(
    room: Room, samples: list[Sample], inputs: list[dict[str, Any]], references: bool
) -> list[Traced]:
    """The texts to replay: the file's outputs, or what the model writes speculatively."""
    from lookahead_hf.cli.analysis.estimate import Traced

    label = "reading the outputs" if references else "generating"
    texts = []
    with room.screen.task(label, len(samples), "prompts") as report:
        for number, (sample, given) in enumerate(zip(samples, inputs, strict=True)):
            if references:
                output, called = room.reference(sample), None
            else:
                written = room.write(given, room.new_tokens)
                output, called = written.output, written.stats.budget_histogram
            texts.append(Traced(room.text(number, sample, given, output), called))
            report(number + 1)
    return texts


def _command(arguments: Arguments) -> str:
    """A command line that measures what was predicted."""
    model = f" --model {shlex.quote(arguments.model)}" if arguments.model else ""
    threads = f" --threads {arguments.threads}" if arguments.threads else ""
    limits = f" --dtype {arguments.dtype} --new-tokens {arguments.new_tokens}{threads}"
    return f"lookahead-hf bench{model}{limits} --prompts {shlex.quote(str(arguments.prompts))}"


def _show(found: list[Finding], about: dict[str, Any], screen: Screen) -> None:
    """Write a table of all groups, then the reasons and settings of each."""
    from lookahead_hf.cli.analysis.report import basis

    measured = about["costs"] == "measured"
    headers = ["prompts", "texts", "speed-up", "of texts", "per step", "tokens/s", "verdict"]
    rows = []
    for finding in found:
        best, plain = finding.best, finding.plain_tokens_per_second
        rows.append(
            [
                finding.group,
                str(finding.texts),
                f"{best.speed_up:.2f}",
                f"{best.lowest:.2f}-{best.highest:.2f}",
                f"{best.tokens_per_step:.2f}",
                f"{plain:.0f} -> {best.tokens_per_second:.0f}" if measured else "",
                finding.verdict,
            ]
        )
    screen.line()
    screen.table(headers, rows)
    for finding in found:
        screen.line(f"\n{finding.group}: {finding.verdict}", "bold")
        screen.line(f"  {finding.why}")
        screen.line(f"  {finding.best.config}", "green")
    screen.line(f"\nTo measure it: {about['command']}")
    screen.line(basis(about), "dim")
