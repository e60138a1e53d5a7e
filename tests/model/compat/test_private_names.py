"""Private names of torch and transformers stand in model/compat/ alone, numba's in one file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lookahead_hf

PACKAGE = Path(lookahead_hf.__file__).parent
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
PRIVATE = re.compile(r"\b_[A-Za-z]\w*")


def defined(source: str) -> Iterator[str]:
    """Private names that a file of ours gives to something."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.arg(arg=name)
            ):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


OUTSIDE = {path: source for path, source in SOURCES.items() if not path.startswith("model/compat/")}
OURS = {name for source in OUTSIDE.values() for name in defined(source)}
OURS |= {Path(path).stem for path in SOURCES}
OURS |= {"_exit", "_getframe", "_set_running_loop", "_value_"}  # Python's
OURS |= {"_amx", "_loops"}  # which end names of compiled functions


def others(source: str) -> Iterator[str]:
    """Private names in a file that are none of ours, with their lines."""
    texts: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):  # a parent comes before its children
        names: list[str] = []
        match node:
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                names = [name]
            case ast.JoinedStr(values=parts):  # a part of a text is no name
                texts |= set(parts)
            case ast.ImportFrom(module=module):
                names = [*(module or "").split("."), *(each.name for each in node.names)]
            case ast.Import():
                names = [part for each in node.names for part in each.name.split(".")]
        for name in names:
            if node not in texts and PRIVATE.fullmatch(name) and name not in OURS:
                yield f"line {node.lineno}: {name}"


OF_OTHERS = {"ngram_pool/jit.py", "utils.py"}
"""Files that know objects of packages that need not be there, which model/compat/ does not import,
and the file that knows how numba compiles and keeps functions."""


@pytest.mark.parametrize("path", sorted(OUTSIDE.keys() - OF_OTHERS))
def test_only_compat_names_what_is_private_to_other_packages(path: str) -> None:
    assert [*others(SOURCES[path])] == []


@pytest.mark.parametrize(
    "line",
    [
        "torch._C._len_torch_dispatch_stack()",
        "from torch._dynamo import OptimizedModule",
        "import torch._dynamo",
        "from torch.utils import _pytree",
        "pipe._forward_params[name]",
        "vars(module).get('_hf_hook')",
    ],
)
def test_the_check_finds_what_is_wrong(line: str) -> None:
    assert any(found.startswith("line 1: _") for found in others(line))
    assert "model/compat/torch.py" in SOURCES
