"""Draw the tokens/s of every system and family from a report of benchmarks/end_to_end.py.

python benchmarks/end_to_end.py --dtype bfloat16 --json bf16.json
python benchmarks/bars.py bf16.json docs/images/families.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import svg

from lookahead_hf.cli.measuring import LOOKUP, OURS, PLAIN

COLOURS = {PLAIN: "#8b949e", LOOKUP: "#d29922", OURS: "#2f81f7"}
"""They stand out on white and on black."""
INK = "#768390"
NAMES, BARS, BAR = 130, 560, 10
"""Pixels: the names of families, the longest bar, the height of a bar."""


def draw(lines: list[dict[str, Any]]) -> str:
    """A picture of the lines of a report, a group of bars for each family."""
    lines = [line for line in lines if line["system"] in COLOURS]
    scale = BARS / max(line["tokens_per_second"] for line in lines)
    systems = [name for name in COLOURS if any(line["system"] == name for line in lines)]
    styles = {name: f"s{at}" for at, name in enumerate(systems)}
    parts, x = [], float(NAMES)
    for name in systems:
        parts += [svg.box(x, 8, 10, 10, styles[name]), svg.text(x + 16, 17, name)]
        x += svg.CHARACTER * len(name) + 44
    y = 34.0
    for family in dict.fromkeys(line["family"] for line in lines):
        group = [line for line in lines if line["family"] == family]
        parts.append(svg.text(8, y + len(group) * BAR / 2 + 4, family))
        for line in group:
            width = scale * line["tokens_per_second"]
            parts.append(svg.box(NAMES, y, width, BAR - 1.5, styles[line["system"]]))
            if line["system"] == OURS:
                value = f"{line['tokens_per_second']:.0f} tokens/s, {line['ratio']:.2f} x plain"
                parts.append(svg.text(NAMES + width + 8, y + BAR - 1, value))
            y += BAR
        y += 9
    colours = {styles[name]: COLOURS[name] for name in systems}
    width = NAMES + BARS + 30 * svg.CHARACTER
    return svg.document(width, y, "tokens per second by family", "".join(parts), colours, INK)


if __name__ == "__main__":
    report, picture = map(Path, sys.argv[1:])
    picture.write_text(draw(json.loads(report.read_text())["lines"]))
