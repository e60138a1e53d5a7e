"""Count the statements of every room, and fail if one has more than the ledger allows.

    python -m tests.size           compare with tests/size.json; `make lint` runs this
    python -m tests.size --write   keep lower numbers in tests/size.json

Lines can be joined, statements cannot: `a, b = x, y` counts as two, and docstrings do not count.
Each number in the ledger is the last one that was committed, so a room can only shrink. Whoever
adds what `may_be_added` allows raises the number of the room and lowers the allowance by as much,
in the same commit.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEDGER = Path(__file__).with_suffix(".json")
FOLDERS = ("lookahead_hf", "tests", "benchmarks", "examples")


def statements(source: str) -> int:
    """Return the number of statements of a program without its docstrings."""
    count = 0
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt) or _is_docstring(node):
            continue
        parts = 1
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            is_unpacked = isinstance(node.targets[0], ast.Tuple)
            parts = len(node.value.elts) if is_unpacked else 1
        count += parts
    return count


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


def room_of(path: Path) -> str:
    """Return the room of a file: its folder in the package, the package's doors, or its tree."""
    parts = path.relative_to(ROOT).parts
    if parts[0] != "lookahead_hf":
        return parts[0]
    return "doors" if len(parts) == 2 else parts[1]


def measured() -> dict[str, int]:
    """Return the statements of all rooms, and the lines and files of the package and its tests."""
    found: Counter[str] = Counter()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            found[room_of(path)] += statements(source)
            if folder in ("lookahead_hf", "tests"):
                found[f"lines of {folder}"] += source.count("\n")
                found[f"files of {folder}"] += 1
            if folder == "lookahead_hf":
                found["package"] += statements(source)
    return dict(sorted(found.items()))


def ledger() -> dict[str, dict[str, int]]:
    """Return what the ledger holds: the last counts, what may be added, what is aimed at."""
    return json.loads(LEDGER.read_text(encoding="utf-8"))


def grown(now: dict[str, int], ledger: dict[str, int]) -> list[str]:
    """Return a sentence about each number that is above the ledger's."""
    return [
        f"{name}: {count}, and at most {ledger.get(name, 0)}"
        for name, count in now.items()
        if count > ledger.get(name, 0)
    ]


def main(arguments: list[str]) -> int:
    """Compare or write; return the exit status."""
    kept = ledger()
    now = measured()
    if arguments == ["--write"]:
        known = kept["committed"]
        kept["committed"] = {
            name: min(count, known.get(name, count)) for name, count in now.items()
        }
        LEDGER.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
        return 0
    wrong = grown(now, kept["committed"])
    for line in wrong:
        print(line)
    if wrong:
        print("Shorten the code, or read tests/size.py on what may be added.")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
