"""The documentation is true: its snippets run or compile, and everything that it names exists."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, TextStreamer

import lookahead_hf
from lookahead_hf.call import execution
from lookahead_hf.tools.cli.commands import COMMANDS
from tests.helpers.tiny_chat import save_tiny_chat

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "lookahead_hf"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
ON_A_CLUSTER = DOCS / "howto" / "many_machines.md"
"""The page that tests/ecosystem runs, since it needs Ray."""
GENERATING = [ROOT / "README.md", *sorted({*DOCS.glob("howto/*.md")} - {ON_A_CLUSTER})]
GENERATING += [DOCS / "quickstart.md", DOCS / "guarantees.md"]
EXCERPTS = [*(DOCS / f"{name}.md" for name in ("index", "statistics", "trace"))]
"""Pages whose snippets use what the reader has: a model, its inputs, a pipeline."""
CONFIG_FIELDS = {field.name for field in dataclasses.fields(lookahead_hf.SpeculativeConfig)}
THEIR_OPTIONS = ("serve",)  # Commands that take options of other programs


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def snippets(page: Path, language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S)
    return [code for written_in, code in blocks if written_in == language]


def inline_code(page: Path) -> list[str]:
    """Code in the prose, on one line each."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def nodes(page: Path) -> Iterator[ast.AST]:
    """What all Python code of a page consists of, that in the prose included."""
    for code in snippets(page, "python"):
        yield from ast.walk(ast.parse(code))
    for code in inline_code(page):
        try:
            yield from ast.walk(ast.parse(code))
        except SyntaxError:  # a command, or a pattern with dots in it
            continue


def check_exists(dotted: str) -> None:
    """Look a dotted name up. The last part is not imported: `lookahead_hf.auto` acts if it is."""
    name, *rest = dotted.split(".")
    found: Any = importlib.import_module(name)
    for place, part in enumerate(rest, start=1):
        name += f".{part}"
        if not hasattr(found, part):
            assert find_spec(name), f"there is no {name}"
            found = importlib.import_module(name) if place < len(rest) else None
        else:
            found = getattr(found, part)


def is_call_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_of_the_package_exist(page: Path) -> None:
    for node in nodes(page):
        if isinstance(node, ast.Attribute) and re.fullmatch(
            r"lookahead_hf[.\w]*", dotted := ast.unparse(node)
        ):
            check_exists(dotted)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lookahead_hf"):
            for each in node.names:
                check_exists(f"{node.module}.{each.name}")
        elif is_call_of(node, "SpeculativeConfig"):
            assert {each.arg for each in node.keywords} <= CONFIG_FIELDS


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_places_in_the_code_exist(page: Path) -> None:
    """A path may begin in the package. Names may follow it: "`rows.py`: `Rows`, `rows_of`"."""
    text = page.read_text()
    for path in re.findall(r"\b(?:lookahead_hf|benchmarks|examples|tests)/[\w/.]*\w", text):
        assert (ROOT / path).exists(), path
    for path, names in re.findall(r"`((?:\w+/)+[\w.]*|\w+\.py)`(:(?:,?\s`[\w.]+`)+)?", text):
        assert (PACKAGE / path).exists() or (ROOT / path).exists(), path
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in re.findall(r"`([\w.]+)`", names):
            check_exists(f"lookahead_hf.{module}.{name}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_statistics_have_the_fields_that_are_read(page: Path) -> None:
    for node in nodes(page):
        if not isinstance(node, ast.Attribute):
            continue
        of = node.value
        if is_call_of(of, "last_stats") or ast.unparse(of) == "stats":
            assert hasattr(lookahead_hf.SpeculativeStats, node.attr), node.attr
        elif is_call_of(of, "totals") or ast.unparse(of) == "totals":
            assert hasattr(lookahead_hf.Totals, node.attr), node.attr


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_options_exist(page: Path) -> None:
    lines = "\n".join(snippets(page, "sh") + snippets(page, "")).replace("\\\n", " ").splitlines()
    for line in [*lines, *inline_code(page)]:
        if not line.startswith("lookahead-hf "):
            continue
        command: click.Command = COMMANDS
        words = shlex.split(line, comments=True)[1:]
        while words and isinstance(command, click.Group) and not words[0].startswith("-"):
            if words[1:2] == ["|"]:  # `demo | generate | ...` lists commands
                break
            command = command.commands[words.pop(0)]
        known = {option for each in command.params for option in each.opts}
        options = {word.split("=")[0] for word in words if word.startswith("--")}
        assert command.name in THEIR_OPTIONS or options <= known | {"--help"}, line


def run(page: Path, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run all Python of a page in its order; return the variables at the end."""
    names = dict(given or {})
    for code in snippets(page, "python"):
        exec(compile(code, str(page), "exec"), names)
    return names


@pytest.fixture
def hub(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a page runs, where the names of models are folders."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", GENERATING, ids=name_of)
def test_snippets_generate_speculatively(page: Path, hub: Path) -> None:
    model = save_tiny_chat(hub / "Qwen" / "Qwen3-0.6B")
    (hub / "Qwen" / "Qwen3-4B").symlink_to(model)
    (hub / "HuggingFaceTB").mkdir()
    (hub / "HuggingFaceTB" / "SmolLM2-135M-Instruct").symlink_to(model)
    names = run(page)
    totals = lookahead_hf.totals(names["pipe"].model if "pipe" in names else names["model"])
    assert totals.num_calls
    assert not totals.fallbacks
    assert totals.stats.tokens_per_step >= 1


@pytest.mark.parametrize("page", EXCERPTS, ids=name_of)
def test_excerpts_generate_speculatively(page: Path, hub: Path) -> None:
    folder = save_tiny_chat(hub / "HuggingFaceTB" / "SmolLM2-135M-Instruct")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = ["def f(x):", "abcabcabc"]
    given = {
        "model": lookahead_hf.enable(model),
        "tokenizer": tokenizer,
        "inputs": tokenizer(prompts[0], return_tensors="pt"),
        "batch": tokenizer(prompts, return_tensors="pt", padding=True),
        "prompts": prompts,
        "prompt_ids": tokenizer(prompts)["input_ids"],
        "previous_answer": "return x",
        "streamer": TextStreamer(tokenizer),
        "cache": DynamicCache(config=model.config),
        "small_model": AutoModelForCausalLM.from_pretrained(folder),
        "pipe": lookahead_hf.pipeline("text-generation", model=model, tokenizer=tokenizer),
    }
    totals = lookahead_hf.totals(run(page, given)["model"])
    assert totals.num_calls and not totals.fallbacks
    assert totals.stats.num_drafted > 0


def test_snippets_build_configurations() -> None:
    assert isinstance(run(DOCS / "settings.md")["config"], lookahead_hf.SpeculativeConfig)


def test_troubleshooting_names_every_reason() -> None:
    named = set(inline_code(DOCS / "troubleshooting.md"))
    reasons = {reason.value for reason in lookahead_hf.FallbackReason}
    ways = {value for name, value in vars(execution).items() if name.isupper()}
    assert reasons | ways <= named


def test_every_page_is_in_the_site() -> None:
    listed = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert f"{page.relative_to(DOCS)}\n" in listed
