"""A page that shows a trace, and what colours its text."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
