"""What a trace says of its tokens, when there is one, and its presentations."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.generation.recorder import OTHER_PROCESS, Tracer
from lookahead_hf.rows import Rows
from lookahead_hf.stats import SpeculativeStats, joined
from lookahead_hf.trace import MODEL, PARTS, Trace, TraceNode, TraceRow, TraceStep, pieces_of
from tests.helpers.models import prompt, tiny
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


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_trace_is_kept_where_it_is_asked_for(trace: bool, num_beams: int) -> None:
    """That of a fallback gives the reason alone."""
    config = SpeculativeConfig(trace=trace, on_fallback="silent")
    with lookahead_hf.enabled(tiny("llama")) as model:
        model.generate(prompt(), num_beams=num_beams, max_new_tokens=3, speculative=config)
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and (stats.trace is not None) == trace
    assert (stats.to_dict()["trace"] is not None) == trace
    assert stats.fallback_reason == ("beams" if num_beams > 1 else None)
    if trace and num_beams > 1:
        assert stats.trace == Trace(fallback_reason="beams")


def test_a_draft_of_another_process_has_no_sources() -> None:
    rows, tracer = Rows(np.array([[5, 6]])), Tracer(dict.fromkeys(PARTS, 0.0))
    rows.emit(0, 7)
    tracer.observe(DraftTree.from_rows([([8], [-1])]), Verdict.from_rows([[7]], [[]]))
    ((node,),) = (row.nodes for row in tracer.finish(rows, ["ngram"]).steps[0].rows)
    assert node.sources == (OTHER_PROCESS,) and node.probability is None
