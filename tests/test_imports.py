"""Imports run one way: modules see only those below them, and nothing sees a test file."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lookahead_hf

PACKAGE = Path(lookahead_hf.__file__).parent
ROOT = PACKAGE.parent

ROOMS = (
    {"structured", "utils"},
    {"config", "draft", "model_state", "rows", "trace"},
    {"ngram_pool"},
    {"fallback", "kernels", "stats"},
    {"compat"},
    {"cache", "call", "distributed", "logits"},
    {"model"},
    {"patches"},
    {"runner"},
    {"support"},
    {"drafting", "verification"},
    {"generation"},
    {"batching"},
    {"hook"},
    {"auto", "compile", "pipelines", "serving", "warmup"},
    {"cli", "ray"},
    {"__main__"},
)
"""Rooms, lowest first. A room is a module or a whole package; those of a level see no other."""

LAYERS = {
    "batching": (
        "log_probs progress threads times",
        "request",
        "alone queues scheduler",
        "prompts",
        "session",
        "manager",
        "methods",
    ),
    "cache": (
        "hf_layers storage",
        "slot_layer",
        "slots",
        "columns",
        "adopt texts",
    ),
    "config": ("__init__",),
    "drafting": (
        """_heap control._learning_numba control.cost_model control.source_backoff drafter
        sources.assistant.model sources.assistant.tokens sources.grammar.probe
        sources.grammar.vocabulary sources.grammar.whitespace sources.prediction_alignment
        sources.recycling_buckets topk""",
        """_numba control.budget sources._recycling_numba sources.assistant.growth
        sources.grammar.growth sources.ngram sources.prediction user_drafter""",
        """in_use sources.assistant.drafter sources.grammar.refinement
        sources.pool sources.recycling""",
        "sources.grammar.drafter sources.mtp",
        "control.calibration",
        "memory tree",
        "ensemble",
        "registry",
        "session",
    ),
    "generation": (
        "finalize options",
        "recorder tracer",
        "session",
        "assembly",
        "decode",
        "strategy",
    ),
    "logits": (
        "grammars.protocol top_k_then_p warpers",
        "grammars.llguidance grammars.outlines_core grammars.xgrammar",
        "constraints",
        "row_processors",
    ),
    "model": ("facts", "numerics position_limits quantization"),
    "ngram_pool": (
        "jit matches",
        "compilation",
        "_logits_numba _numba store",
        "_pool_table _rows_numba logits_memory",
        "_pool_numba suffix_index",
        "pool",
        "__init__",
    ),
    "kernels": (
        "_attention_parts cpu.fields cpu.llvm cpu.team data",
        "_common cpu.scalars cpu.vectors",
        """reference cpu._choice_numba cpu._elementwise_numba cpu._plan_numba
        cpu._products_numba tiles""",
        "cpu._attention_numba",
        "cpu._program_numba",
        "cpu.program",
        "attention compact reject topk verify",
        "dispatch",
        "__init__",
    ),
    "patches": (
        "install layers.code layers.trial lazy_mask tree_attention trust",
        "forward layers.programs",
        "attention implicit_positions mixers",
        "layers.descriptions layers.plans layers.room patched",
        "layers.step",
        "layers.compiled",
        "layers.steps",
        "layers",
    ),
    "runner": (
        """cuda.capture cuda.transfer flat masks non_finite passthrough_kwargs recurrent""",
        "cuda.state layout outputs",
        "cuda.graph_set cuda.step host",
        "cuda.decision cuda.graphs prefill",
        "cuda.runner",
    ),
    "ray": ("data serving", "__init__"),
    "serving": ("metrics openai_fields tools", "fields", "schemas", "middleware", "server"),
    "support": ("self_test", "checks"),
    "verification": (
        "node_processors rng verifier",
        "generators lockstep noise",
        "walk",
        "batched_walk follower rejection",
        "device",
        "select",
    ),
}
"""Modules of the larger packages, lowest first; those of a layer see no other."""

NARROW = {
    "stats": {"draft", "model_state", "trace", "utils"},
    "fallback": {"model_state", "utils"},
    "compat": {"fallback", "model_state"},
    "call": {"compat"},
    "ngram_pool": {"utils"},
    "kernels": {"ngram_pool"},  # how numba compiles
    "": {"fallback"},  # says why an import failed
}
"""Rooms that see fewer rooms than those below them."""

PACKAGES = {
    "ngram_pool": {"numpy", "numba"},
    "draft": {"numpy"},
    "rows": {"numpy"},
    "config": set(),
    "fallback": set(),
    "model_state": set(),
    "stats": {"numpy"},
    "trace": set(),
    "utils": {"torch", "transformers"},  # both where a model is unwrapped
}
"""Rooms that import nothing else from outside but the standard library and these packages."""


class Imports(ast.NodeVisitor):
    """Collects the modules that a file imports when it runs, at any place of it.

    Imports under `if TYPE_CHECKING` do not count.
    """

    def __init__(self, modules: set[str]) -> None:
        self.modules = modules
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
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            is_module = name in self.modules or node.module == "lookahead_hf"
            self.names.append((node.lineno, name if is_module else str(node.module)))


def modules_in(folder: Path, root: Path) -> dict[str, Path]:
    """Modules below a folder by the names under which files below `root` import them."""
    paths = sorted(folder.rglob("*.py"))
    names = [".".join(path.relative_to(root).with_suffix("").parts) for path in paths]
    return {name.removesuffix(".__init__"): path for name, path in zip(names, paths, strict=True)}


MODULES = modules_in(PACKAGE, ROOT)


def imports_of(source: str, modules: set[str] = frozenset(MODULES)) -> Iterator[tuple[int, str]]:
    visitor = Imports(modules)
    visitor.visit(ast.parse(source))
    yield from dict.fromkeys(visitor.names)


def room_of(module: str) -> str:
    """The longest room whose name begins the module's; else its package or, at the top, ""."""
    below = module.removeprefix("lookahead_hf").removeprefix(".")
    known = set().union(*ROOMS)
    parts = below.split(".")
    prefixes = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in known), parts[0])


def layer_of(module: str, room: str) -> int | None:
    """Number of the module's layer inside its room, None if the room has no layers."""
    if room not in LAYERS:
        return None
    name = module.removeprefix(f"lookahead_hf.{room}").removeprefix(".") or "__init__"
    return next((i for i, layer in enumerate(LAYERS[room]) if name in layer.split()), -1)


def forbidden(module: str, source: str) -> list[str]:
    """Imports in `source` that a module may not have, with their lines."""
    room = room_of(module)
    level = next((i for i, rooms in enumerate(ROOMS) if room in rooms), len(ROOMS))
    seen = NARROW.get(room, set().union(*ROOMS[:level]))
    wrong = []
    for line, name in imports_of(source):
        package = name.partition(".")[0]
        if package == "lookahead_hf":
            other = room_of(name)
            if other == room:
                is_wrong = not _is_below(name, module, room)
            else:  # the package itself offers what `hook` and `pipelines` have
                is_wrong = other not in seen and not (other == "" and "hook" in seen)
        else:
            allowed = PACKAGES.get(room)
            is_wrong = allowed is not None and package not in allowed | set(sys.stdlib_module_names)
        if is_wrong:
            wrong.append(f"line {line}: {name}")
    return wrong


def _is_below(other: str, module: str, room: str) -> bool:
    """Whether a module of the same room is in a lower layer, if the room has layers."""
    theirs, own = layer_of(other, room), layer_of(module, room)
    return theirs is None or own is None or 0 <= theirs < own


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_is_below_it(module: str) -> None:
    source, room = MODULES[module].read_text(), room_of(module)
    ours = [name for _, name in imports_of(source) if name.startswith("lookahead_hf")]
    has_place = room == "" or any(room in rooms for rooms in ROOMS)
    assert has_place, f"{module} has no place in ROOMS"
    assert not ours or layer_of(module, room) != -1, f"{module} has no place in LAYERS"
    assert forbidden(module, source) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rows", "from lookahead_hf.hook import enable"),
        ("rows", "from lookahead_hf import hook"),
        ("rows", "def f():\n    import lookahead_hf.generation.decode"),
        ("drafting.registry", "from lookahead_hf.verification import walk"),
        ("drafting.control.source_backoff", "from lookahead_hf.drafting import session"),
        (
            "drafting.control.source_backoff",
            "from lookahead_hf.drafting.control.budget import Budget",
        ),
        ("kernels.dispatch", "import lookahead_hf.draft"),
        ("ngram_pool.store", "import torch"),
        ("runner.masks", "def f():\n    from lookahead_hf.runner.host import Runner"),
        ("stats", "from lookahead_hf.rows import Rows"),
    ],
)
def test_the_check_finds_what_is_wrong(module: str, source: str) -> None:
    ((line, name),) = imports_of(source)
    assert forbidden(f"lookahead_hf.{module}", source) == [f"line {line}: {name}"]


def test_the_design_names_every_room() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    house = page.partition("## The house\n")[2]
    rooms = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\* [^:]+:", house, re.M))))
    assert rooms == set().union(*ROOMS) - {"__main__"}


def circle_in(modules: dict[str, Path]) -> list[str]:
    """Modules that import each other in a circle, the first at both ends; [] if there are none."""
    graph = {
        module: {name for _, name in imports_of(path.read_text(), set(modules)) if name in modules}
        for module, path in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("folder", ["lookahead_hf", "benchmarks"])
def test_no_modules_import_each_other(folder: str) -> None:
    # Programs of benchmarks/ import their neighbours by their bare names.
    root = ROOT if folder == "lookahead_hf" else ROOT / folder
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
