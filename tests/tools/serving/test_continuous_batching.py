"""Requests that are decoded together, as the server does unless it is told otherwise."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lookahead_hf import SpeculativeConfig, totals
from lookahead_hf.queue.manager import RUN
from lookahead_hf.tools.serving.answers import Pieces
from lookahead_hf.tools.serving.fields import Limits
from tests.helpers.served import Served, hooked, joined, save_ascii_chat, serving
from tests.helpers.tiny_chat import DRAFTING

PROMPTS = ["def f(x):", "def g(y):\n    return y", "a b a b a b"]


@pytest.fixture(scope="module")
def expected(folder: str) -> list[str]:
    """The texts of the server without continuous batching."""
    config = SpeculativeConfig(**DRAFTING)
    with serving(folder, config, continuous_batching=False) as served:
        return [served.plain(prompt) for prompt in PROMPTS]


def test_requests_are_decoded_together_with_the_texts_of_generate(
    served: Served, expected: list[str]
) -> None:
    with ThreadPoolExecutor(3) as clients:
        assert list(clients.map(served.text, PROMPTS)) == expected
    assert any(each.name.startswith(RUN) for each in threading.enumerate())
    assert totals(served.model).stats.num_accepted > 0
    assert not totals(served.model).fallbacks
    assert "lookahead_hf:spec_decode_num_accepted_tokens_total 0.0" not in served.get("/metrics")


def test_requests_start_one_queue(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    running, started = served.server._generation_state.get_manager.__self__, list[Any]()

    def start(model: Any) -> None:
        time.sleep(0.2)
        started.append(model)
        running.queue = SimpleNamespace(fatal_error=None)

    monkeypatch.setattr(running, "queue", None)
    monkeypatch.setattr(running, "_start_queue", start)
    with ThreadPoolExecutor(2) as readers:
        assert all(readers.map(running.uses_queue, "ab", [SimpleNamespace(name="LLM")] * 2))
    assert len(started) == 1


def test_a_request_does_not_wait_for_all_texts_of_another_one(served: Served) -> None:
    assert len(served.text(max_tokens=4)) == 4
    engine = served.server._generation_state.get_manager.__self__.queue.engine
    goes_on, large = threading.Event(), {"prompt": ["x = "] * 6, "n": 8, "max_tokens": 24}
    wait = lambda *args: None if goes_on.wait(60) else ()  # noqa: E731
    with hooked(served.model, wait), ThreadPoolExecutor(2) as clients:
        found = [clients.submit(served.post, "/v1/completions", large)]
        while len(engine.waiting) < 47:
            time.sleep(0.01)
        found.append(clients.submit(served.text, max_tokens=4))
        while len(engine.waiting) < 48:
            time.sleep(0.01)
        goes_on.set()
        assert len(found[1].result()) == 4 and engine.waiting
        assert found[0].result()[0] == 200


def test_the_health_is_that_of_the_queue(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(served.text(max_tokens=4)) == 4
    queue = served.server._generation_state.get_manager.__self__.queue
    monkeypatch.setattr(queue, "fatal_error", RuntimeError())
    with pytest.raises(HTTPError, match="503"):
        served.get("/health")


@pytest.mark.filterwarnings("ignore:.*runs plain generate")
def test_what_is_decoded_alone_is_decoded_beside_the_others(
    served: Served, expected: list[str]
) -> None:
    of_beams = {"generation_config": json.dumps({"num_beams": 2, "max_new_tokens": 48})}
    alone: list[dict[str, Any]] = [
        {"speculative": False},
        {"speculative": {"drafters": ["ngram"]}},
        {"prediction": {"type": "content", "content": expected[0]}},
        {"speculative": {"on_fallback": "silent"}, **of_beams},
    ]
    with ThreadPoolExecutor(8) as clients:
        others = [clients.submit(served.text, prompt) for prompt in PROMPTS]
        answers = [clients.submit(served.ask, PROMPTS[0], extra_body=each) for each in alone]
        assert [each.result() for each in others] == expected
        plain, own, predicted, beams = [each.result() for each in answers]
    assert [a.choices[0].message.content for a in (plain, own, predicted)] == [expected[0]] * 3
    assert predicted.usage.completion_tokens_details.accepted_prediction_tokens > 20
    assert beams.metrics["speculative_decoding"]["fallback_reason"] == "beams"
    text = served.text(PROMPTS[0], extra_body={"speculative": False, **of_beams})
    assert beams.choices[0].message.content == text
    assert getattr(plain, "metrics", None) is None


@pytest.mark.parametrize("own", [{}, {"speculative": False}], ids=["together", "alone"])
def test_a_stream_has_the_end_that_is_no_whole_character(served: Served, own: Any) -> None:
    (timed,) = served.server._model_manager.loaded_models.values()
    half = timed.processor("é", add_special_tokens=False)["input_ids"][0]
    bias = {"logit_bias": {str(half): 100}, "max_tokens": 3, "extra_body": own}
    whole = served.text(**bias)
    assert whole.endswith("\ufffd")
    assert joined(served.ask(stream=True, **bias)) == whole


def log_probs(served: Served, prompt: str, text: str) -> list[float]:
    """The log probabilities of the tokens of a text, which are characters, after a prompt."""
    (timed,) = served.server._model_manager.loaded_models.values()
    said = [{"role": "user", "content": prompt}]
    head = timed.processor.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
    tokens = timed.processor(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        scores = served.model(torch.tensor([head + tokens])).logits[0].log_softmax(-1)
    return [float(scores[len(head) - 1 + at, token]) for at, token in enumerate(tokens)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [False, True])
def test_log_probabilities(served: Served, expected: list[str], stream: bool, stop: bool) -> None:
    given = {"logprobs": True, "top_logprobs": 2, "stop": expected[0][9:11] if stop else None}
    answer = served.ask(PROMPTS[0], stream=stream, **given)
    chunks = list(answer) if stream else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    places = [each for choice in choices if choice.logprobs for each in choice.logprobs.content]
    text = expected[0][: expected[0].index(given["stop"])] if stop else expected[0]
    assert "".join(place.token for place in places) == text
    assert [place.logprob for place in places] == pytest.approx(
        log_probs(served, PROMPTS[0], text), abs=1e-4
    )
    for place in places:
        first, second = place.top_logprobs
        assert first.token == place.token and first.logprob == place.logprob > second.logprob
    assert choices[-1].finish_reason == ("stop" if stop else "length")


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_characters_of_several_tokens(served: Served, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"const": "語 é!"}}}
    given = {"logprobs": True, "top_logprobs": 3, "stop": "!", "response_format": form}
    answer = served.ask(stream=stream, **given)
    choices = [each for chunk in (answer if stream else [answer]) for each in chunk.choices]
    places = [each for choice in choices if choice.logprobs for each in choice.logprobs.content]
    assert [place.token for place in places] == ['"', "", "", "語", " ", "", "é"]
    assert all(place.bytes == [*place.token.encode()] for place in places)
    assert all(place.top_logprobs[0].token == place.token for place in places)


def test_the_pieces_of_a_text_are_its_tokens() -> None:
    """Spaces stand where the text has them; a character is the last of its tokens."""
    vocabulary = {"\u2581a": 0, "</s>": 1, "\u2581b": 2, "<0xE8>": 3}
    words = Tokenizer(models.WordLevel(vocabulary, "</s>"))
    words.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    output = SimpleNamespace(generated_tokens=[0, 2, 1, 2, 3, 3], logprobs=[-1.0] * 6)
    output.top_logprobs, output.is_finished = [{0: -1.0, 3: -2.0}] * 6, lambda: True
    found = [*Pieces(tokenizer).places(output, 0)]
    assert [place["token"] for *_, place in found] == ["a", " b", "</s>", " b", "", "\ufffd\ufffd"]
    assert [begin for begin, *_ in found] == [0, 1, 3, 3, 5, 5] and found[-1][1] == 7
    known = [byte for *_, place in found for byte in place["bytes"]]
    assert bytes(known).decode() == tokenizer.decode([0, 2, 2, 3, 3]) == "a b b\ufffd\ufffd"
    tops = [[each["token"] for each in place["top_logprobs"]] for *_, place in found]
    assert tops[:2] == [["a", "\ufffd"], [" a", "\ufffd"]]


def test_an_output_that_cannot_be_shown_ends_its_request(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Pieces, "add", None)
    status, answer = served.post("/v1/completions", {"prompt": "x", "logprobs": 1})
    assert status == 500 and "the server failed at this request" in answer
    assert "a request failed" in caplog.text


def test_log_probabilities_of_completions(served: Served) -> None:
    given = {"model": served.folder, "max_tokens": 5, "temperature": 0, "logprobs": 2}
    (choice,) = served.client.completions.create(prompt="abc", **given).choices
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text and found.text_offset == [*range(5)]
    assert [max(each.values()) for each in found.top_logprobs] == found.token_logprobs
    assert {len(each) for each in found.top_logprobs} == {2}


@pytest.mark.filterwarnings("ignore:.*runs plain generate")
def test_a_text_whose_positions_change_is_written_beside_the_others(tmp_path: Path) -> None:
    folder = save_ascii_chat(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.max_position_embeddings = 48
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model.save_pretrained(folder)
    threads: set[str] = set()
    with (
        serving(folder, SpeculativeConfig(**DRAFTING), limits=Limits(tokens=200)) as served,
        hooked(served.model, lambda *args: threads.add(threading.current_thread().name)),
    ):
        assert served.text(max_tokens=60) == served.plain(max_tokens=60)
        assert served.ask(max_tokens=60).metrics["speculative_decoding"]["fallback_reason"]
    assert len(threads) == 1 and not threads.pop().startswith(RUN)
