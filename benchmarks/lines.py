"""Lines of a benchmark: a table that grows while it runs, and the same in a file."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch


class Report:
    """Lines of one dataclass, shown and stored as they come.

    A line that cannot be measured says why in its field `ran`, and the next one follows.
    """

    def __init__(self, path: Path | None, **about: Any) -> None:
        """Store in this file what the lines are about, and the lines."""
        self.path, self.about = path, {"torch": torch.__version__, **about}
        self.lines: list[Any] = []
        self.failed = 0

    def add(self, line: Any, work: Callable[[], Any] = dict) -> None:
        """Add a line with the fields that `work` measures; a list of them adds several lines."""
        try:
            found = work()
        except Exception as error:
            traceback.print_exc()
            self.failed += 1
            said = str(error).strip().partition("\n")[0][:120]
            found = {"ran": f"{type(error).__name__}: {said}"}
        for fields in found if isinstance(found, list) else [found]:
            self._show(asdict(replace(line, **fields)))
            self.lines.append(replace(line, **fields))
        if self.path:
            report = {"about": self.about, "lines": [asdict(each) for each in self.lines]}
            self.path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    def _show(self, values: dict[str, Any]) -> None:
        if not self.lines:
            print(f"| {' | '.join(values)} |\n|{'---|' * len(values)}")
        print(f"| {' | '.join(map(_said, values.values()))} |", flush=True)

    def end(self, may_fail: bool = False) -> None:
        """Exit with status 1 if there is no line, or one failed that may not."""
        if len(self.lines) == self.failed or (self.failed and not may_fail):
            raise SystemExit(f"{self.failed} of {len(self.lines)} lines have failed")


def _said(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)
