"""`lookahead-hf trace`: who foresaw each token of a text."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby

import click

from lookahead_hf.tools.cli.commands.generate import open_stage, read_prompt
from lookahead_hf.tools.cli.measuring import timed_call
from lookahead_hf.tools.cli.parsing import NEW_FILE, Arguments, command, generation_options
from lookahead_hf.tools.cli.screen import Screen
from lookahead_hf.tools.trace.page import colours, runs
from lookahead_hf.trace import MODEL, Trace

_EXAMPLES = """\
examples:
  lookahead-hf trace "Name three uses of a paper clip"
  lookahead-hf trace --html trace.html --perfetto trace.json < prompt.txt
  lookahead-hf trace --json "What is 12 times 12?" > trace.json
"""


@command("trace", _EXAMPLES, indent=None)
@click.argument("prompt", required=False)
@generation_options()
@click.option("--html", type=NEW_FILE, help="write a page that shows every step")
@click.option("--perfetto", type=NEW_FILE, help="write a time line for https://ui.perfetto.dev")
def COMMAND(arguments: Arguments, screen: Screen) -> None:
    """Generate one text and show which source foresaw each token.

    Without PROMPT, stdin is the prompt.
    """
    prompt = read_prompt(arguments.prompt)
    stage = open_stage(arguments, screen, warms_up=False)
    inputs = stage.encode(prompt)
    config = replace(stage.config, trace=True, on_fallback="error")
    drafting = {**stage.drafting, "speculative": config}
    call = timed_call(stage.model, {**inputs, **stage.generation, **drafting}, stage.seed)
    assert call.stats is not None
    stats = call.stats.with_text(stage.tokenizer)
    trace = stats.trace
    assert trace is not None
    if arguments.html is not None:
        arguments.html.write(trace.to_html())
    if arguments.perfetto is not None:
        json.dump(trace.to_perfetto(), arguments.perfetto)
    screen.result({"prompt": prompt, "stats": stats.to_dict()})
    show(trace, screen)
    screen.note(f"\n{stats}", "dim")


def show(trace: Trace, screen: Screen) -> None:
    """Write the text coloured by who foresaw it, and a legend.

    Without colours, foreseen text is put in single angle quotes.
    """
    styles, counts = colours(trace), trace.num_by_origin
    if screen.has_colour:
        for origin, text in runs(trace, 0):
            screen.write(text, styles.get(origin, ""))
    else:
        for is_foreseen, run in groupby(runs(trace, 0), key=lambda run: run[0] != MODEL):
            text = "".join(text for _, text in run)
            screen.write(f"\u2039{text}\u203a" if is_foreseen else text)
    screen.line("\n")
    for origin, count in counts.items():
        name = "the model itself" if origin == MODEL else origin
        share = count / max(1, sum(counts.values()))
        screen.line(f"\u25a0 {name}: {count} tokens, {share:.0%}", styles.get(origin, ""))
