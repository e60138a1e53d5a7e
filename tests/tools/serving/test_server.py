"""transformers' server on the loopback with speculation, as its clients see it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from lookahead_hf import SpeculativeConfig
from lookahead_hf.ngram_pool import NgramPool
from tests.helpers.served import Served, hooked, joined, serving

PREFIX = "lookahead_hf:spec_decode_num_"


def speculated(answer: Any) -> dict[str, Any]:
    """The statistics of an answer, which must not be plain's."""
    counts = answer.metrics["speculative_decoding"]
    assert "fallback_reason" not in counts and counts["num_accepted_draft_tokens"] > 0
    return dict(counts)


def predicting(text: str) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": text}}


class Widths(list[int]):
    """How many tokens each forward was given."""

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.append(kwargs["input_ids"].shape[1])


def test_an_answer_is_plains_text(served: Served, folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = [{"role": "user", "content": "def f(x):"}]
    inputs = tokenizer.apply_chat_template(said, return_dict=True, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    plain = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])
    answer = served.ask()
    assert answer.choices[0].message.content == plain == served.plain()
    counts = speculated(answer)
    assert counts["num_spec_steps"] + counts["num_accepted_draft_tokens"] == 47
    assert answer.usage.completion_tokens_details is None


def test_a_stream_has_the_text_and_at_its_end_the_statistics(served: Served) -> None:
    plain = served.plain()
    *chunks, last = served.ask(stream=True, **predicting(plain))
    assert joined(chunks) == plain
    assert last.usage.completion_tokens == 48
    assert last.usage.completion_tokens_details.accepted_prediction_tokens > 36
    assert speculated(last)["num_spec_steps"] < 12


def test_a_prediction_saves_forwards(served: Served) -> None:
    plain = served.plain("class A:", max_tokens=120)
    edited = plain[:50] + "an edit" + plain[54:]
    with hooked(served.model, Widths()) as widths:
        answer = served.ask("class A:", max_tokens=120, **predicting(edited))
    assert answer.choices[0].message.content == plain
    assert len(widths) * 3 <= 120
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 60
    counts = speculated(answer)
    rejected = counts["num_draft_tokens"] - counts["num_accepted_draft_tokens"]
    assert 0 < details.rejected_prediction_tokens <= rejected


def test_a_request_can_switch_speculation_off(served: Served) -> None:
    with hooked(served.model, Widths()) as widths:
        answer = served.ask(extra_body={"speculative": False}, **predicting("def"))
    assert widths[1:] == [1] * 47
    assert not hasattr(answer, "metrics")
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        # Only building the drafters shows that these are wrong.
        ({"speculative": {"drafters": ["assistant"]}}, "needs a model to draft with"),
        ({"speculative": {"options": {"recycling": {"top_k": 0}}}}, "top_k"),
        # A generation config opens no files either.
        ({"generation_config": '{"speculative": {"pool": "/etc/passwd"}}'}, "Extra inputs"),
    ],
)
def test_a_wrong_value_is_a_bad_request(
    served: Served, fields: dict[str, Any], allowed: str, stream: bool
) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match=allowed):
        served.ask(stream=stream, extra_body=fields)


def test_the_other_endpoints_speculate_too(served: Served) -> None:
    given = {"model": served.folder, "temperature": 0}
    completion = served.client.completions.create(prompt="x = ", max_tokens=48, **given)
    assert speculated(completion)["num_spec_steps"] < 47
    given = {**given, "input": "x = ", "max_output_tokens": 48}
    *_, last = served.client.responses.create(stream=True, **given)
    whole = served.client.responses.create(**given)
    assert last.response.output_text == whole.output_text
    assert speculated(last.response)["num_spec_steps"] < 47
    assert speculated(whole)["num_spec_steps"] < 47


def test_prometheus_reads_sums_over_all_requests(served: Served) -> None:
    def read() -> dict[str, float]:
        lines = [line.rsplit(" ", 1) for line in served.get("/metrics").splitlines() if line]
        return {name[len(PREFIX) :]: float(value) for name, value in lines if name[0] != "#"}

    served.ask()
    before = read()
    counts = speculated([*served.ask(stream=True)][-1])
    served.plain()
    added = {name: value - before.get(name, 0) for name, value in read().items()}
    names = "drafts_total", "draft_tokens_total", "accepted_tokens_total"
    of_answer = "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"
    assert [added[name] for name in names] == [counts[name] for name in of_answer]
    at = "accepted_tokens_per_pos_total{"
    by_position = [value for name, value in sorted(added.items()) if name.startswith(at)]
    assert by_position[0] == counts["num_spec_steps"] - counts["acceptance_histogram"][0]
    assert sum(by_position) == counts["num_accepted_draft_tokens"]


@pytest.mark.parametrize("is_named", [False, True])
def test_a_pool_that_does_not_fit_is_refused_before_the_server_starts(
    folder: str, is_named: bool
) -> None:
    pool = NgramPool(64, vocab_size=1000)
    own = (None, {"own": pool}) if is_named else (pool, {})
    with pytest.raises(ValueError, match="the pool has token ids"):
        serving(folder, SpeculativeConfig(pool=own[0]), pools=own[1]).__enter__()


def test_an_unknown_server_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.cli.serving.utils import GenerationState

    from lookahead_hf.tools.serving.server import UnknownServerError, speculating

    monkeypatch.delattr(GenerationState, "get_manager")
    with pytest.raises(UnknownServerError, match=r"get_manager.*5\.17,<5\.25"):
        speculating(SpeculativeConfig()).__enter__()
