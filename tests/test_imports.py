"""Imports run one way: every room sees only the rooms below it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lookahead_hf

ROOT = Path(lookahead_hf.__file__).parent

LEVELS = (
    {"config", "compat", "rows", "draft", "fallback", "quantization", "repositories", "model_state"}
    | {"generation.outputs"},
    {"stats", "generation.streaming", "ngram_pool", "kernels", "generation.prompts"},
    {"logits", "cache", "distributed"},
    {"runner"},
    {"drafting", "verification"},
    {"generation.finalize", "generation.request"},
    {"generation.call"},
    {"generation.decode"},
    {"generation.options"},
    {"generation.strategy"},
    {"hook"},
    {"pipelines", "warmup", "auto", "cli"},
    {"__main__"},
)
"""Rooms, from the lowest up; those of one level do not see each other."""

NARROW = {
    "stats": {"draft"},
    "generation.streaming": {"draft"},
    "generation.options": {"compat", "config", "fallback", "repositories"},
    "ngram_pool": set(),
    "kernels": set(),
    "generation": set(),
    "": set(),
}
"""Rooms that see less of ours than what is below them."""

PACKAGES = {
    "ngram_pool": {"numpy", "numba"},
    "draft": {"numpy"},
    "rows": {"numpy"},
    "config": set(),
    "fallback": set(),
    "quantization": set(),
    "stats": {"numpy"},
}
"""Rooms whose other imports come from the standard library and from these packages only."""


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    """The room of a file, by its path below the package; "" for the package itself."""
    return _room(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__"))


def _room(module: str) -> str:
    """The room of a module, by its name below the package: of `generation` each file is one."""
    first, _, rest = module.strip(".").partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "generation" and rest else first


class Imports(ast.NodeVisitor):
    """Modules that a file imports when it runs, wherever in it; not those for type checkers."""

    def __init__(self) -> None:
        self.names: list[tuple[int, str]] = []

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for each in node.orelse:
                self.visit(each)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.names += [(node.lineno, alias.name) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, f"line {node.lineno}: a relative import"
        assert node.module is not None
        if node.module == "lookahead_hf":
            self.names += [(node.lineno, f"lookahead_hf.{alias.name}") for alias in node.names]
        elif node.module == "lookahead_hf.generation":
            self.names += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        else:
            self.names.append((node.lineno, node.module))


def imports_of(source: str) -> Iterator[tuple[int, str]]:
    visitor = Imports()
    visitor.visit(ast.parse(source))
    yield from visitor.names


def forbidden(room: str, source: str) -> list[str]:
    """Imports in `source` that a file of `room` may not have, with their lines."""
    level = next((i for i, rooms in enumerate(LEVELS) if room in rooms), len(LEVELS))
    seen = NARROW.get(room, set().union(*LEVELS[:level]))
    wrong = []
    for line, name in imports_of(source):
        package, _, rest = name.partition(".")
        if package == "lookahead_hf":
            other = _room(rest)
            # The package itself offers what `hook` and `pipelines` have.
            is_wrong = other not in seen | {room} and not (other == "" and "hook" in seen)
        else:
            allowed = PACKAGES.get(room)
            is_wrong = allowed is not None and package not in allowed | set(sys.stdlib_module_names)
        if is_wrong:
            wrong.append(f"line {line}: {name}")
    return wrong


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_is_below_it(path: Path) -> None:
    room = room_of(path)
    assert room in ("", "generation") or any(room in rooms for rooms in LEVELS), (
        f"{room} has no place in the graph"
    )
    assert forbidden(room, path.read_text()) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("rows", "from lookahead_hf.hook import enable"),
        ("rows", "from lookahead_hf import hook"),
        ("rows", "def f():\n    import lookahead_hf.generation.decode"),
        ("drafting", "from lookahead_hf.verification import walk"),
        ("kernels", "import lookahead_hf.draft"),
        ("ngram_pool", "import torch"),
        ("stats", "from lookahead_hf.rows import Rows"),
    ],
)
def test_the_check_finds_what_is_wrong(room: str, source: str) -> None:
    assert forbidden(room, source) == [f"line {source.count(chr(10)) + 1}: {_only(source)}"]


def _only(source: str) -> str:
    return next(name for _, name in imports_of(source))


def test_the_check_passes_what_is_right() -> None:
    source = """
from typing import TYPE_CHECKING
import numpy as np
from lookahead_hf.draft import DraftTree
if TYPE_CHECKING:
    from lookahead_hf.hook import Hook
"""
    assert forbidden("stats", source) == []
