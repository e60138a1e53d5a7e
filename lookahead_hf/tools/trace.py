"""A page that shows a trace, and a notebook's view of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from itertools import cycle, groupby

from lookahead_hf.trace import MODEL, PARTS, Trace

_COLOURS = {
    "ngram": "#2f7ed8",
    "recycling": "#2ca25f",
    "pool": "#e6842a",
    "prediction": "#9467bd",
    "assistant": "#17a2b8",
}
_MORE_COLOURS = ("#b58900", "#c0563f", "#6c71c4", "#708090", "#8fa31e")


def colours(trace: Trace) -> dict[str, str]:
    """Return a colour, such as "#2f7ed8", for each origin of tokens and nodes but the model."""
    others = cycle(_MORE_COLOURS)
    drafted = [node.origin for step in trace.steps for row in step.rows for node in row.nodes]
    origins = dict.fromkeys([*trace.num_by_origin, *drafted])
    return {name: _COLOURS.get(name) or next(others) for name in origins if name != MODEL}


def runs(trace: Trace, row: int) -> Iterator[tuple[str, str]]:
    """Yield the text of a row as runs of tokens of one origin: the origin, and the run's text."""
    tokens = zip(trace.origins(row), trace.texts(row), strict=True)
    for origin, run in groupby(tokens, key=lambda token: token[0]):
        yield origin, "".join(text for _, text in run)


def page(trace: Trace) -> str:
    """Return a page that holds the trace and loads nothing; see `Trace.to_html`."""
    data = {
        "trace": trace.to_dict(),
        "parts": PARTS,
        "colours": colours(trace),
        "origins": list(trace.num_by_origin.items()),
    }
    # No text can end the script element that holds the data, as the data contain no "<".
    packed = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    template = files(__package__).joinpath("trace.html").read_text("utf-8")
    return template.replace("{{DATA}}", packed)


def notebook(summary: str, trace: Trace | None) -> str:
    """Return a table of a summary's lines, "name: value", and the coloured text of a trace."""
    cells = [map(escape, line.partition(": ")[::2]) for line in summary.splitlines()]
    lines = ["<tr><td style='text-align:left'>" + "</td><td>".join(cell) for cell in cells]
    shown = [f"<table>{''.join(lines)}</table>"]
    if trace is not None and trace.steps:
        styles = {name: f" style='background:{each}55'" for name, each in colours(trace).items()}
        legend = [(name, f" {name}: {count} ") for name, count in trace.num_by_origin.items()]
        for line in [legend, *(runs(trace, row) for row in range(trace.num_rows))]:
            spans = (f"<span{styles.get(name, '')}>{escape(text)}</span>" for name, text in line)
            style = "white-space:pre-wrap;font-family:monospace"
            shown.append(f"<p style='{style}'>{''.join(spans)}</p>")
    return "".join(shown)
