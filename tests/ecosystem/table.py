"""Write docs/ecosystem.md: every caller, run here plainly and speculatively.

    python -m tests.ecosystem.table docs/ecosystem.md

The page marks libraries that are not installed; `pip install ".[ecosystem]"` installs
most of them. The page is kept as it is before "Tested callers", and from "Other tests" on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from tests.ecosystem import adapted, callers, frameworks, harnesses, pictures, servers, trainers
from tests.ecosystem.room import NOT_REACHED, SPECULATES, Caller, Room, try_out

WRITTEN, BY_HAND = "## Tested callers\n", "## Other tests\n"
"""The headings at which the part that this program writes begins and ends; it keeps the rest."""

SECTIONS = {
    "Pipelines, servers, agents": [
        *callers.CALLERS,
        pictures.PIPELINE,
        *servers.CALLERS,
        *frameworks.CALLERS,
    ],
    "Evaluation and training": [*harnesses.CALLERS, *trainers.CALLERS],
    "Adapters, quantisation, placement": adapted.CALLERS,
}


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    name: str
    version: str
    result: str
    how: str
    note: str


def every_caller() -> list[Caller]:
    """All callers, in the table's order."""
    return [caller for section in SECTIONS.values() for caller in section]


def run_here(name: str) -> Line:
    """Run one caller in this process."""
    (caller,) = (each for each in every_caller() if each.name == name)
    with tempfile.TemporaryDirectory() as scratch:
        outcome = try_out(caller, Room(Path(scratch) / "room"))
    if outcome.status == SPECULATES:
        same = "same text" if outcome.is_equal else "another text"
        result = f"speculates, {same}"
    elif outcome.status == NOT_REACHED:
        result = NOT_REACHED
    else:
        result = f"plain generation (`{outcome.status}`)"
        assert outcome.is_equal
    return Line(caller.name, caller.versions, result, caller.how, caller.note)


def run_apart(caller: Caller) -> Line:
    """Run one caller in a process of its own: some change settings of the whole process."""
    if caller.missing:
        result = f"not installed here: {', '.join(caller.missing)}"
        return Line(caller.name, "", result, caller.how, caller.note)
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--one", caller.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        return Line(caller.name, caller.versions, f"failed: {last}", caller.how, caller.note)
    return Line(**json.loads(done.stdout.splitlines()[-1]))


def as_page(sections: dict[str, list[Line]], rest: str) -> str:
    """The page in Markdown; `rest` is what people write."""
    parts = [_INTRODUCTION.format(torch=torch.__version__, transformers=transformers.__version__)]
    for title, lines in sections.items():
        parts.append(
            f"## {title}\n\n| caller | result | switched on by | note |\n|---|---|---|---|"
        )
        for line in lines:
            name = f"{line.name} ({line.version})" if line.version else line.name
            parts[-1] += f"\n| {name} | {line.result} | {line.how} | {line.note} |"
    return "\n\n".join([*parts, rest])


_INTRODUCTION = """\
## Tested callers

`python -m tests.ecosystem.table docs/ecosystem.md` wrote the tables, with torch {torch} and
transformers {transformers} on a CPU. Every caller runs twice on tiny random models, plainly and
speculatively, each in a process of its own. "speculates" means that drafts were accepted; "same
text" means that the caller returned the same result both times. tests/ecosystem asserts this for
every library that is installed. The column "switched on by" names everything that was done to get
speculation.

Speculation needs two things. First, `generate` must know the argument `speculative`:

* call `lookahead_hf.enable(model)` if you have the model;
* `import lookahead_hf.auto` anywhere in the process if a library loads the model. For a program
  that you cannot edit, run `python -m lookahead_hf.auto PROGRAM ...`, for example
  `python -m lookahead_hf.auto lm_eval --model hf ... --gen_kwargs speculative=True`;
* `lookahead_hf.pipeline(...)` enables the pipeline's model.

Without this, transformers refuses the argument, and an entry in a generation config has no effect.

Second, the call must ask for speculation: with the argument `speculative=True` or, if the caller
passes no arguments on, with `lookahead_hf.set_default(model, True)`. The default is stored as
`model.generation_config.speculative`, and `save_pretrained` keeps it.

One switch does both: `lookahead_hf.enable(model, default=True)`, LOOKAHEAD_HF=1 in the environment
of a process that imports `lookahead_hf.auto`, or
`python -m lookahead_hf.auto --speculative PROGRAM ...`. `speculative=False` in a call turns it
off."""


def main(words: list[str]) -> None:
    if words[0] == "--one":
        print(json.dumps(vars(run_here(words[1]))))
        return
    sections = {}
    for title, section in SECTIONS.items():
        sections[title] = []
        for caller in section:
            sections[title].append(run_apart(caller))
            print(f"{caller.name}: {sections[title][-1].result}", file=sys.stderr)
    page = Path(words[0])
    before, _, after = page.read_text().partition(WRITTEN)
    after = after.partition(BY_HAND)[2]
    page.write_text(before + as_page(sections, BY_HAND + after))


if __name__ == "__main__":
    main(sys.argv[1:])
