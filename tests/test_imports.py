"""Imports run one way: rooms see only those below them, the core sees nothing outside of it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lookahead_hf
from lookahead_hf.call import optional

PACKAGE = Path(lookahead_hf.__file__).parent
ROOT = PACKAGE.parent

ROOMS = (
    {"call.optional", "structured", "utils"},
    {"config", "draft", "model.state", "rows", "trace"},
    {"ngram_pool"},
    {"fallback", "kernels", "stats"},
    {"model.compat"},
    {"cache", "call", "logits"},
    {"call.arguments", "model"},
    {"block"},
    {"runner"},
    {"model.self_test"},
    {"call.admission"},
    {"drafting", "verification"},
    {"generation"},
    {"distributed"},
    {"engines.cpu", "engines.cuda", "engines.hybrid"},
    {"sources"},
    {"queue"},
    {"hook"},
    {"auto", "compile", "pipelines", "warmup"},
    {"tools.trace"},
    {"tools.serving"},
    {"tools.cli"},
)
"""Rooms, lowest first. A room is a module or a whole package; those of a level see no other."""

OUTSIDE = ("distributed", "engines", "queue", "sources", "tools")
"""What the core does not import, so that it works without. All else is the core."""

DOORS = {"__main__", "ray"}
"""Modules that only give names to users. They import anything, and nothing imports them."""

NARROW = {
    "stats": {"draft", "call.optional", "model.state", "trace", "utils"},
    "fallback": {"model.state", "utils"},
    "model.compat": {"fallback", "model.state"},
    "call": {"config", "model.compat", "rows"},
    "ngram_pool": {"utils"},
    "kernels": {"call.optional", "ngram_pool"},  # how numba compiles
}
"""Rooms that see fewer rooms than those below them."""

PACKAGES = {
    "call.optional": set(),
    "ngram_pool": {"numpy", "numba", "safetensors"},
    "draft": {"numpy"},
    "rows": {"numpy"},
    "config": set(),
    "fallback": set(),
    "model.state": set(),
    "stats": {"numpy"},
    "trace": set(),
    "utils": {"torch", "transformers"},  # both where a model is unwrapped
}
"""Rooms that import nothing else from outside but the standard library and these packages."""

NAMES_OUTSIDE = re.compile(rf"(lookahead_hf|\.)\.({'|'.join(OUTSIDE)})(\.[\w.]+)?")

TABLES = ("call.optional", "drafting")
"""Modules of the core that name modules outside of it, which are imported when they are used."""

MOST_FILES = 14  # Most files of a folder


class Imports(ast.NodeVisitor):
    """Collects the modules that a file imports, at any place of it, for types or when it runs."""

    def __init__(self, modules: set[str]) -> None:
        self.modules = modules
        self.is_for_types = False
        self.names: list[tuple[int, str, bool]] = []

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            was, self.is_for_types = self.is_for_types, True
            for each in node.body:
                self.visit(each)
            self.is_for_types = was
            for each in node.orelse:
                self.visit(each)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.names += [(node.lineno, alias.name, self.is_for_types) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, f"line {node.lineno}: a relative import"
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            is_module = name in self.modules or node.module == "lookahead_hf"
            found = name if is_module else str(node.module)
            self.names.append((node.lineno, found, self.is_for_types))


def modules_in(folder: Path, root: Path) -> dict[str, Path]:
    """Modules below a folder by the names under which files below `root` import them."""
    paths = sorted(folder.rglob("*.py"))
    names = [".".join(path.relative_to(root).with_suffix("").parts) for path in paths]
    return {name.removesuffix(".__init__"): path for name, path in zip(names, paths, strict=True)}


MODULES = modules_in(PACKAGE, ROOT)
KNOWN = set().union(*ROOMS)
STANDARD = set(sys.stdlib_module_names)


def imports_of(
    source: str, modules: set[str] = frozenset(MODULES)
) -> Iterator[tuple[int, str, bool]]:
    """Line, module and whether it is for types alone, of each import."""
    visitor = Imports(modules)
    visitor.visit(ast.parse(source))
    yield from dict.fromkeys(visitor.names)


def below(module: str) -> str:
    return module.removeprefix("lookahead_hf").removeprefix(".")


def room_of(module: str) -> str:
    """The longest room whose name begins the module's; else the module's own name."""
    parts = below(module).split(".")
    prefixes = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in KNOWN), below(module))


def level_of(room: str) -> int:
    return next((i for i, rooms in enumerate(ROOMS) if room in rooms), len(ROOMS))


def is_outside(module: str) -> bool:
    return below(module).partition(".")[0] in OUTSIDE


def may_import(module: str, other: str) -> bool:
    """Whether a module of the package may import another one."""
    if below(module) in DOORS or below(module) == "":
        return True
    if below(other) in DOORS or (is_outside(other) and not is_outside(module)):
        return False
    room, theirs = room_of(module), room_of(other)
    if theirs == room:
        return True
    if theirs == "":  # the package offers what `hook` and `pipelines` have
        theirs = "hook"
    return theirs in NARROW.get(room, set().union(*ROOMS[: level_of(room)]))


def forbidden(module: str, source: str) -> list[tuple[int, str]]:
    """Imports in `source` that a module may not have, with their lines."""
    allowed = PACKAGES.get(room_of(module))
    wrong = []
    for line, name, is_for_types in imports_of(source):
        package = name.partition(".")[0]
        if package == "lookahead_hf":
            if not may_import(module, name):
                wrong.append((line, below(name)))
        elif allowed is not None and not is_for_types and package not in allowed | STANDARD:
            wrong.append((line, name))
    return wrong


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_is_below_it(module: str) -> None:
    has_place = room_of(module) in KNOWN or below(module) in DOORS or is_a_folder_of_rooms(module)
    assert has_place, f"{module} has no place in ROOMS"
    found = forbidden(module, MODULES[module].read_text())
    assert [f"line {line}: {name}" for line, name in found] == []


def is_a_folder_of_rooms(module: str) -> bool:
    """Whether a module is a package that holds nothing but rooms; so is the whole package."""
    parts = {room.partition(".")[0] for room in KNOWN}
    return below(module) in parts | {""} and MODULES[module].name == "__init__.py"


def test_only_two_tables_name_what_is_outside_of_the_core() -> None:
    """What is imported by its name breaks no rule above, so the names have their places, too."""
    found = set()
    for module, path in MODULES.items():
        if is_outside(module) or below(module) in DOORS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and NAMES_OUTSIDE.fullmatch(str(node.value)):
                found.add(below(module))
    assert found == {*TABLES}
    assert {*optional.MODULES.values()} <= MODULES.keys()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rows", "from lookahead_hf.hook import enable"),
        ("rows", "from lookahead_hf import hook"),
        ("rows", "def f():\n    import lookahead_hf.generation.decode"),
        ("rows", "if TYPE_CHECKING:\n    from lookahead_hf.runner.host import Runner"),
        ("drafting.registry", "from lookahead_hf.verification import walk"),
        ("kernels.reference", "import lookahead_hf.draft"),
        ("ngram_pool.pool", "import torch"),
        ("block.masks", "def f():\n    from lookahead_hf.runner.host import Runner"),
        ("stats", "from lookahead_hf.rows import Rows"),
        ("runner.attention", "from lookahead_hf.engines.cuda.graphs import GraphSet"),
        ("hook", "from lookahead_hf.tools.serving import server"),
        ("warmup", "from lookahead_hf.sources.heads import MtpDrafter"),
        ("engines.cuda.step", "from lookahead_hf.engines import hybrid"),
        ("tools.cli.models", "from lookahead_hf.ray import Job"),
    ],
)
def test_the_check_finds_what_is_wrong(module: str, source: str) -> None:
    ((line, name, _),) = imports_of(source)
    assert forbidden(f"lookahead_hf.{module}", source) == [(line, below(name))]


def test_the_design_names_every_room() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    house = page.partition("## The house\n")[2]
    rooms = set(re.findall(r"`([\w.]+)`", "".join(re.findall(r"^\* [^:]+:", house, re.M))))
    assert rooms == KNOWN


def test_no_folder_has_too_many_files() -> None:
    folders = [path for path in (PACKAGE, *PACKAGE.rglob("*")) if path.is_dir()]
    numbers = {path: len([*path.glob("*.py")]) for path in folders}
    assert {str(path): n for path, n in numbers.items() if n > MOST_FILES} == {}


def circle_in(modules: dict[str, Path]) -> list[str]:
    """Modules that import each other in a circle, the first at both ends; [] if there are none."""
    graph = {
        module: {name for _, name, _ in imports_of(path.read_text(), {*modules}) if name in modules}
        for module, path in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("folder", ["lookahead_hf", "benchmarks"])
def test_no_modules_import_each_other(folder: str) -> None:
    root = ROOT if folder == "lookahead_hf" else ROOT / folder  # imported by their bare names
    assert circle_in(modules_in(ROOT / folder, root)) == []


TEST_IMPORT = re.compile(
    r"\b(?:tests(?:\.\w+)*\.test_\w+|from tests(?:\.\w+)* import [^;#\n]*\btest_\w+)"
)
"""Matches code and text alike, since tests also run code in other processes."""


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_nothing_imports_from_a_test_file(folder: str) -> None:
    paths = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / folder).rglob("*.py")}
    found = {name for name, path in paths.items() if TEST_IMPORT.search(path.read_text())}
    assert not found
