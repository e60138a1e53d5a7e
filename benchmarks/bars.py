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

from lookahead_hf.tools.cli.measuring import LOOKUP, OURS, PLAIN

COLOURS = {PLAIN: "#8b949e", LOOKUP: "#d29922", OURS: "#2f81f7"}
"""They stand out on white and on black."""
INK = "#24292f"
NAMES, BARS, BAR = 130, 560, 10
"""Pixels: the names of families, the longest bar, the height of a bar."""


Bar = tuple[str, float, str]
"""A bar's series, its value, and what is written behind it."""


def draw(lines: list[dict[str, Any]]) -> str:
    """A picture of the lines of a report, a group of bars for each family."""
    groups: dict[str, list[Bar]] = {}
    for line in lines:
        if line["system"] in COLOURS:
            value = f"{line['tokens_per_second']:.0f} tokens/s, {line['ratio']:.2f} x plain"
            label = value if line["system"] == OURS else ""
            bar = line["system"], line["tokens_per_second"], label
            groups.setdefault(line["family"], []).append(bar)
    return grouped(groups, COLOURS, "tokens per second by family")


def grouped(groups: dict[str, list[Bar]], colours: dict[str, str], title: str) -> str:
    """A picture of groups of bars.

    Args:
        groups: The bars by the name of their group.
        colours: Colour of each series, in the order of the legend.
        title: What a screen reader says.
    """
    bars = [bar for group in groups.values() for bar in group]
    scale = BARS / max(value for _, value, _ in bars)
    series = [name for name in colours if any(bar[0] == name for bar in bars)]
    styles = {name: f"s{at}" for at, name in enumerate(series)}
    parts, y = [legend(styles, NAMES)], 34.0
    for name, group in groups.items():
        parts.append(svg.text(8, y + len(group) * BAR / 2 + 4, name))
        for kind, value, label in group:
            parts.append(svg.box(NAMES, y, scale * value, BAR - 1.5, styles[kind]))
            if label:
                parts.append(svg.text(NAMES + scale * value + 8, y + BAR - 1, label))
            y += BAR
        y += 9
    width = NAMES + BARS + svg.CHARACTER * (2 + max(len(label) for _, _, label in bars))
    width = max(width, NAMES + sum(svg.CHARACTER * len(name) + 44 for name in series))
    return svg.document(
        width, y, title, "".join(parts), {styles[name]: colours[name] for name in series}, INK
    )


def legend(styles: dict[str, str], x: float) -> str:
    """A line with a box of its colour before the name of each series."""
    parts = []
    for name, style in styles.items():
        parts += [svg.box(x, 8, 10, 10, style), svg.text(x + 16, 17, name)]
        x += svg.CHARACTER * len(name) + 44
    return "".join(parts)


if __name__ == "__main__":
    report, picture = map(Path, sys.argv[1:])
    picture.write_text(draw(json.loads(report.read_text())["lines"]))
