"""What a trace says of its tokens, and its presentations."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from lookahead_hf.stats import SpeculativeStats, joined
from lookahead_hf.trace import MODEL, Trace, TraceNode, TraceRow, TraceStep, pieces_of
from tests.helpers.tiny_chat import byte_tokenizer

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Words:
    """A tokenizer whose tokens are words."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def decode(self, ids: list[int]) -> str:
        return "".join(self.words[each] for each in ids)


def traced() -> Trace:
    """Two rows, of which the first accepts nodes; a processor has replaced the last of them."""
    nodes = (
        TraceNode(1, -1, 1, ("ngram", "recycling"), 0.75),
        TraceNode(3, -1, 1, ("recycling",), 0.25),
        TraceNode(2, 0, 2, ("ngram",), 0.5),
    )
    none = TraceRow(1, (), (), (3,))
    return Trace(
        num_rows=2,
        steps=(
            TraceStep((TraceRow(0, (), (), (0,)), none), 0.0, 5.0, prefill_ms=4.0),
            TraceStep((TraceRow(0, nodes, (0, 2), (1, 2, 3)), none), 5.0, 4.0, 0.0, 1.0, 2.0),
            TraceStep((TraceRow(0, nodes[:1], (0,), (2, 0)),), 9.0, 3.0, forward_ms=2.0),
        ),
    )


def test_tokens_have_origins_and_texts() -> None:
    bare, trace = traced(), traced().with_text(Words("a", "b", EVIL, "\n"))
    assert bare.tokens(0) == [0, 1, 2, 3, 2, 0] and bare.tokens(1) == [3, 3]
    assert bare.origins(0) == [MODEL, "ngram + recycling", "ngram", MODEL, MODEL, MODEL]
    assert bare.num_by_origin == {MODEL: 6, "ngram + recycling": 1, "ngram": 1}
    assert bare.texts(1) == ["3 ", "3 "]
    assert trace.texts(0) == ["a", "b", EVIL, "\n", EVIL, "a"]
    assert [node.text for node in trace.steps[1].rows[0].nodes] == ["b", "\n", EVIL]


@pytest.mark.parametrize("cut", [0, 7])
def test_pieces_join_to_the_text(cut: int) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("naïve 日本 <end>")[: -cut or None]
    pieces = pieces_of(tokenizer, ids)
    assert len(pieces) == len(ids) and "".join(pieces) == tokenizer.decode(ids)
    assert pieces[2:4] == ("", "ï")


def test_traces_of_several_decodings_are_joined() -> None:
    trace = traced().with_text(Words("a", "b", "c", "d"))
    both = joined(SpeculativeStats(trace=trace), SpeculativeStats(trace=trace)).trace
    assert both is not None and both.texts(0) == 2 * trace.texts(0)
    assert [step.start_ms for step in both.steps] == [0, 5, 9, 12, 17, 21]
    assert joined(SpeculativeStats(trace=trace), SpeculativeStats()).trace == trace


class Elements(HTMLParser):
    """Collects the elements of a page and what they load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str | None] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value for name, value in attributes if name in ("src", "href")]


def test_a_page_loads_nothing_and_runs_no_text() -> None:
    trace = traced().with_text(Words("a", "b", EVIL, "{{DATA}}"))
    page = trace.to_html()
    found = Elements(page)
    assert found.tags.count("script") == 2 and "img" not in found.tags and not found.loaded
    assert "innerHTML" not in page and "default-src 'none'" in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    values = json.loads(data[1])
    assert values["trace"] == json.loads(json.dumps(trace.to_dict()))
    assert set(values["colours"]) == {"ngram", "ngram + recycling", "recycling"}
    assert "beams" in Trace(fallback_reason="beams").to_html()
