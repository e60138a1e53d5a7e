"""Write docs/ecosystem.md: every caller, run here plainly and speculatively.

    python -m tests.ecosystem.table docs/ecosystem.md

What is not installed is marked so; `pip install "lookahead-hf[ecosystem]"` installs the most.
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

from tests.ecosystem import adapted, callers, frameworks, harnesses, pictures
from tests.ecosystem.room import NOT_REACHED, SPECULATES, Caller, Room, try_out

SECTIONS = {
    "Pipelines, servers, agents": [*callers.CALLERS, *pictures.CALLERS[:1], *frameworks.CALLERS],
    "Evaluation and training": harnesses.CALLERS,
    "Adapters, quantisation, placement": [*adapted.CALLERS, *pictures.CALLERS[1:]],
}

TESTED_ELSEWHERE = (
    ("torch.compile(model)", "speculates, same text; its `generate` runs the uncompiled model"),
    ("model.compile(), model.forward = torch.compile(...)", "speculates, same text"),
    ("DistributedDataParallel", "speculates, same text: `lookahead_hf.generate(wrapped, ...)`"),
    ("FSDP2 fully_shard, before and after enable", "speculates, same text (one process)"),
    (
        "FSDP2 fully_shard, two processes",
        "speculates, same text, also where the processes' texts end at different steps",
    ),
    (
        "DeepSpeed ZeRO-3, two processes",
        "speculates, same text (deepspeed 0.19.8, which no extra installs)",
    ),
    ("tensor parallel, two processes", "speculates, same text; the first process decides"),
    ("a `generate` that is bound to the object, as unsloth's", "speculates, same text"),
    ("custom_generate repositories", "speculates, same text: examples/custom_generate"),
    ("pipeline any-to-any", "speculates, same text: `lookahead_hf.pipeline`"),
)
"""Rows of which tests/test_owners.py, tests/test_pipelines.py and tests/processes are the
evidence."""

NOT_RUN = (
    (
        "transformers serve --continuous-batching, generate_batch, TRL with continuous batching",
        "not reached: requests go to another engine, which never calls `generate`",
    ),
    ("guidance", "not reached: it calls the model's forward in a loop of its own"),
    (
        "instructor, pydantic-ai, dspy, litellm",
        "no local backend: through `transformers serve`",
    ),
    ("transformers chat", "a client of `transformers serve`"),
    (
        "Gradio, Ray Data map_batches",
        "not run: they call user code, as in examples/streaming.py, or `enable(model)` in an actor",
    ),
    ("vLLM, SGLang, ray.data.llm", "not reached: engines of their own"),
    (
        "pipelines document-question-answering, table-question-answering, text-to-audio",
        "not served by `lookahead_hf.pipeline`: they pass on no argument of `generate`",
    ),
    (
        "GPTQModel, AutoAWQ",
        "not run, they need a GPU; their wrappers are looked into (tests/test_wrappers.py); AWQ's "
        "fused layers bring a cache of their own and are to be left out",
    ),
    ("bitsandbytes LLM.int8", "not run, too slow on a CPU; its activations are quantised"),
    (
        "DeepSpeed init_inference",
        "not run; with injected kernels it has a cache of its own: use the model without them",
    ),
    (
        "pipelines of processes, tensor parallel models whose weights are sharded too",
        "plain generation (`tensor_parallel`)",
    ),
)
"""Rows that this machine cannot run, or that there is nothing to run of."""


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


def as_page(sections: dict[str, list[Line]]) -> str:
    """The page in Markdown."""
    parts = [_INTRODUCTION.format(torch=torch.__version__, transformers=transformers.__version__)]
    for title, lines in sections.items():
        parts.append(
            f"## {title}\n\n| caller | result | switched on by | note |\n|---|---|---|---|"
        )
        for line in lines:
            name = f"{line.name} ({line.version})" if line.version else line.name
            parts[-1] += f"\n| {name} | {line.result} | {line.how} | {line.note} |"
    for title, rows in (("Tested elsewhere", TESTED_ELSEWHERE), ("Not run", NOT_RUN)):
        table = "\n".join(f"| {name} | {text} |" for name, text in rows)
        parts.append(f"## {title}\n\n| what | result |\n|---|---|\n{table}")
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """\
# Who calls `generate`, and what comes of it

Written by `python -m tests.ecosystem.table docs/ecosystem.md` with torch {torch} and transformers
{transformers} on a CPU. Every caller runs twice on tiny random models, plainly and speculatively,
each in a process of its own; "speculates" means that drafts were accepted, "same text" that all it
returned was equal. tests/ecosystem asserts the same of whatever is installed.

Two switches reach nearly everything: `lookahead_hf.enable(model)`, or `import lookahead_hf.auto`
where the model is out of reach, and `lookahead_hf.set_default(model, True)`, which is kept in
`model.generation_config.speculative`, where the caller takes no arguments for `generate`."""


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
    Path(words[0]).write_text(as_page(sections))


if __name__ == "__main__":
    main(sys.argv[1:])
