"""The fields of speculation in a request's body, and in an answer's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lookahead_hf import SpeculativeConfig, SpeculativeStats
from lookahead_hf.fallback import FallbackReason
from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.serving.fields import ServedRequest, add_to_answer, add_to_events, take_request
from lookahead_hf.stats import SourceStats

POOL = NgramPool(64)
SERVER = SpeculativeConfig(budget=4, pool=POOL)

STATS = SpeculativeStats(
    rows=1,
    row_steps=4,
    num_drafted=9,
    num_accepted=5,
    accepted_histogram=(1, 1, 2),
    per_source={"prediction": SourceStats(7, 5, 5)},
)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, None),
        (False, False),
        (True, SERVER),
        ({"budget": 2}, SpeculativeConfig(budget=2, pool=POOL)),
        ({"drafters": ["ngram", "pool"]}, SpeculativeConfig(drafters=("ngram", "pool"), pool=POOL)),
        ({"drafters": ["ngram"]}, SpeculativeConfig(drafters=("ngram",))),
        ("recycling", SpeculativeConfig(drafters=("recycling",))),
    ],
)
def test_a_request_switches_speculation(asked: Any, expected: Any) -> None:
    body = {"model": "m", "speculative": asked}
    assert take_request(body, SERVER).speculative == expected
    assert body == {"model": "m"}


@pytest.mark.parametrize(
    "content", ["ab\n", [{"type": "text", "text": "a"}, {"type": "text", "text": "b\n"}]]
)
def test_a_prediction_is_a_string_or_parts(content: Any) -> None:
    body = {"prediction": {"type": "content", "content": content}}
    assert take_request(body, SERVER).prediction == "ab\n"
    assert body == {}


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("speculative", "fast", "true, false, one of the presets default, .* max_draft_nodes"),
        ("speculative", 1, "true, false"),
        ("speculative", {"budget": -1}, "from 0 to max_draft_nodes"),
        ("speculative", {"speed": 2}, "it has drafters, max_draft_nodes"),
        ("speculative", {"pool": "/etc/passwd"}, "--pool FILE"),
        ("speculative", {"learn": True}, "--pool FILE"),
        ("prediction", "text", '"content": TEXT'),
        ("prediction", {"type": "content"}, '"content": TEXT'),
        ("prediction", {"type": "content", "content": [{"type": "image"}]}, '"type": "text"'),
    ],
)
def test_a_wrong_value_is_told_what_is_allowed(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=allowed):
        take_request({field: value}, SERVER)


def test_an_answer_reports_the_prediction_and_vllms_statistics() -> None:
    request = ServedRequest(prediction="text", stats=STATS)
    answer = json.loads(add_to_answer(b'{"usage": {"completion_tokens": 9}}', request))
    assert answer["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 2,
    }
    assert answer["metrics"] == {"speculative_decoding": STATS.to_dict("vllm")}


def test_a_fallback_is_reported_with_its_reason() -> None:
    stats = SpeculativeStats(fallback_reason=FallbackReason.BEAMS)
    answer = json.loads(add_to_answer(b'{"usage": {}}', ServedRequest(stats=stats)))
    assert answer["metrics"]["speculative_decoding"]["fallback_reason"] == "beams"


@pytest.mark.parametrize(
    "events",
    [
        b'data: {"choices": [{"text": "\\"usage\\""}]}\n\n',
        b'data: {"usage": null}\n\n',
        b'data: "usage"\n\ndata: [DONE]\n\n',
        b'data: {"error": ""usage""}\n\n',
        b': "usage"\n\n',
    ],
)
def test_events_without_usage_stay_as_they_are(events: bytes) -> None:
    assert add_to_events(events, ServedRequest(stats=STATS)) == events


def test_the_usage_of_a_stream_gets_the_statistics() -> None:
    text = b'data: {"choices": []}\n\n'
    events = text + b'data: {"response": {"usage": {}}}\n\n'
    changed = add_to_events(events, ServedRequest(stats=STATS))
    assert changed.startswith(text + b"data: ") and changed.endswith(b"}\n\n")
    added = json.loads(changed[len(text) + 6 :])["response"]["metrics"]
    assert added["speculative_decoding"]["num_accepted_draft_tokens"] == 5
