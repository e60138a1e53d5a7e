"""Write docs/ecosystem.md: every caller, run here plainly and speculatively.

    python -m tests.ecosystem.table docs/ecosystem.md

The page marks libraries that are not installed; `pip install "lookahead-hf[ecosystem]"` installs
most of them. The section "Not run" of the page is kept as it is.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from tests.ecosystem import adapted, callers, frameworks, harnesses, pictures, servers
from tests.ecosystem.room import NOT_REACHED, SPECULATES, Caller, Room, try_out

NOT_RUN = "## Not run\n"
"""The heading of the part of the page that people write; this program keeps it."""

SECTIONS = {
    "Pipelines, servers, agents": [
        *callers.CALLERS,
        pictures.PIPELINE,
        *servers.CALLERS,
        *frameworks.CALLERS,
    ],
    "Evaluation and training": [*harnesses.CALLERS, *pictures.EVALUATION],
    "Adapters, quantisation, placement": [*adapted.CALLERS, pictures.FILE],
}


@dataclass(frozen=True)
class Elsewhere:
    """A row whose evidence are tests of other folders.

    Attributes:
        name: What generates.
        file: The file of the tests.
        tests: The names of the tests, with spaces between them.
        result: The result that the table shows if all of them pass.
    """

    name: str
    file: str
    tests: str
    result: str


_OWNERS, _PROCESSES = "tests/test_owners.py", "tests/distributed/test_coordinator.py"

TESTED_ELSEWHERE = (
    Elsewhere(
        "torch.compile(model), model.compile(), model.forward = torch.compile(...)",
        _OWNERS,
        "test_compiled_models",
        "speculates, same text; `generate` of torch.compile(model) runs the uncompiled model",
    ),
    Elsewhere(
        "DistributedDataParallel",
        _OWNERS,
        "test_data_parallel",
        "speculates, same text: `lookahead_hf.generate(wrapped, ...)`",
    ),
    Elsewhere(
        "FSDP2 fully_shard, before and after enable",
        _OWNERS,
        "test_sharded_before_and_after",
        "speculates, same text (one process)",
    ),
    Elsewhere(
        "FSDP2 fully_shard, two processes",
        _PROCESSES,
        "test_sharded_models_write_plains_text test_sharded_models_that_are_not_told_to_keep_step",
        "speculates, same text, even if the texts of the processes end at different steps",
    ),
    Elsewhere(
        "DeepSpeed ZeRO-3, two processes",
        "tests/distributed/test_families.py",
        "test_zero_3",
        "speculates, same text",
    ),
    Elsewhere(
        "tensor parallel, two processes",
        _PROCESSES,
        "test_tensor_parallel_writes_plains_text test_one_clock_decides test_one_seed_decides",
        "speculates, same text; the first process decides",
    ),
    Elsewhere(
        "a `generate` bound to the model object, as by unsloth",
        _OWNERS,
        "test_a_method_that_somebody_bound",
        "speculates, same text: call `enable(model)` after the method is bound",
    ),
    Elsewhere(
        "examples/custom_generate as a custom_generate repository",
        _OWNERS,
        "test_a_call_that_names_a_repository test_a_model_loaded_from_such_a_repository",
        "speculates, same text",
    ),
    Elsewhere(
        "a model that has its own custom_generate repository",
        _OWNERS,
        "test_a_repository_that_declares_to_pass_its_arguments_on",
        "speculates, same text, if the repository's function sets "
        "`speculative_passthrough = True`: it passes its keyword arguments to `generate`",
    ),
    Elsewhere(
        "the same, without that declaration",
        _OWNERS,
        "test_a_repository_that_declares_nothing",
        "plain generation (`own_generate`)",
    ),
    Elsewhere(
        "pipeline any-to-any",
        "tests/test_pipelines.py",
        "test_pipelines_that_read_pictures",
        "speculates, same text: `lookahead_hf.pipeline`",
    ),
)


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


def run_tests(row: Elsewhere) -> str:
    """What the table says of a row, by its tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
    command += [f"{row.file}::{test}" for test in row.tests.split()]
    said = subprocess.run(command, capture_output=True, text=True, timeout=900)
    last = said.stdout.strip().splitlines()[-1:]
    if said.returncode:
        return f"failed: {last}"
    if "skipped" in last[0]:
        return f"not run here: {'; '.join(re.findall(r'SKIPPED .*?: (.*)', said.stdout))}"
    return row.result


def as_page(sections: dict[str, list[Line]], elsewhere: dict[str, str], rest: str) -> str:
    """The page in Markdown; `rest` is its last section, which people write."""
    parts = [_INTRODUCTION.format(torch=torch.__version__, transformers=transformers.__version__)]
    for title, lines in sections.items():
        parts.append(
            f"## {title}\n\n| caller | result | switched on by | note |\n|---|---|---|---|"
        )
        for line in lines:
            name = f"{line.name} ({line.version})" if line.version else line.name
            parts[-1] += f"\n| {name} | {line.result} | {line.how} | {line.note} |"
    table = "\n".join(f"| {name} | {text} |" for name, text in elsewhere.items())
    parts.append(f"## Other tests\n\n| what | result |\n|---|---|\n{table}")
    return "\n\n".join([*parts, rest])


_INTRODUCTION = """\
# Callers of `generate`

`python -m tests.ecosystem.table docs/ecosystem.md` wrote this page, with torch {torch} and
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
`model.generation_config.speculative`, and `save_pretrained` keeps it."""


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
    elsewhere = {}
    for row in TESTED_ELSEWHERE:
        elsewhere[row.name] = run_tests(row)
        print(f"{row.name}: {elsewhere[row.name]}", file=sys.stderr)
    page = Path(words[0])
    rest = page.read_text().partition(NOT_RUN)
    page.write_text(as_page(sections, elsewhere, NOT_RUN + rest[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
