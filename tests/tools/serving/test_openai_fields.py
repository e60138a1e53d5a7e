"""Fields of OpenAI's API: each is obeyed, or refused with a sentence that clients show."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from lookahead_hf.tools.serving import server
from lookahead_hf.tools.serving.checks import CHAT, COMPLETIONS, REFUSED, RESPONSES, check_fields
from tests.helpers.served import Served

SAID = [{"role": "user", "content": "a"}]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def part(each: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [each]}]}


NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID},
    COMPLETIONS: {"prompt": "a"},
    RESPONSES: {"input": "a", "parallel_tool_calls": None},
}


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        (CHAT, {"n": 9}, "n=9 is not served: Input should be less than or equal to 8"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs=21 is not served: Input"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs is served beside logprobs=true"),
        (CHAT, {"logprobs": True, "speculative": False}, "where requests are decoded together"),
        (CHAT, {"presence_penalty": 5}, "presence_penalty=5 is not served: Input should be less"),
        (CHAT, {"tool_choice": "required"}, 'give "required" with tools'),
        (CHAT, {"stream": True, "n": 0}, "n=0 is not served: Input should be greater"),
        (CHAT, {"top_k": 5}, "Unexpected fields in the request: {'top_k'}"),
        (COMPLETIONS, {"logprobs": 6}, "less than or equal to 5"),
        (COMPLETIONS, {"echo": True}, "put the prompt before the answer"),
        (CHAT, {"seed": 2**64}, "seed=18446744073709551616 is not served: Input should be less"),
        (CHAT, {"tools": [{"name": "a"}]}, "the chat template shows no tools"),
        (CHAT, {"stop": 5}, "a valid string; Input should be a valid list"),
        (CHAT, {"messages": None}, "the request has no messages"),
        (CHAT, {"messages": ["a"]}, "messages='a' is not served: Input should be a valid dict"),
        (CHAT, part(PICTURE), "image_url: this model reads"),
        (RESPONSES, {"input": [{"type": "input_image", "image_url": "x"}]}, "pattern '^data:'"),
        *(
            (CHAT, part({"type": "input_audio", "input_audio": each}), "is not served")
            for each in (
                *("a.wav", "/a.wav", "file:a.wav", "http://a", {"data": "a.wav"}),
                *({"data": "AA==", "format": each} for each in ("", "/../../a")),
            )
        ),
        (CHAT, {"logit_bias": {"\u0663": 1}}, "should match pattern"),
        (CHAT, {"generation_config": '{"fast": null}'}, "fast=None is not served: Extra inputs"),
    ],
)
def test_what_is_not_obeyed_is_refused(
    served: Served, path: str, fields: dict[str, Any], said: str
) -> None:
    status, answer = served.post(path, {"model": served.folder, **NEEDED[path], **fields})
    assert status == 400
    assert said in json.loads(answer)["error"]["message"]


def test_values_that_ask_for_nothing_are_taken(served: Served) -> None:
    neutral = {"n": 1, "logprobs": False, "presence_penalty": 0, "tool_choice": "auto", "stop": []}
    assert served.text(user="me", **neutral) == served.text()
    for path, fields in REFUSED.items():
        for name, (values, _) in fields.items():
            for value in (None, *values):
                check_fields(path, {**NEEDED[path], name: value}, "m")
            with pytest.raises(ValueError, match=f"^{name}='other' is not served"):
                check_fields(path, {**NEEDED[path], name: "other"}, "m")
    body: dict[str, Any] = {"messages": SAID, "tools": [{}], "tool_choice": "none"}
    check_fields(CHAT, body, "m")
    assert "tools" not in body


def test_a_model_that_is_not_served(served: Served) -> None:
    from openai import NotFoundError

    assert [each.id for each in served.client.models.list()] == [served.folder]
    with pytest.raises(NotFoundError, match="no model 'gpt-4o' here: this server has") as raised:
        served.client.chat.completions.create(model="gpt-4o", messages=SAID)
    assert raised.value.code == "model_not_found"
    found = [served.post(path, {"model": "gpt-4o"})[0] for path in ("/load_model", "/reset")]
    assert found == [404, 403]


def test_no_request_loads_another_model_or_opens_a_file(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("python_multipart")
    parts = [("file", '; filename="a.wav"', "RIFF"), ("model", "", "gpt-4o")]
    head = '--x\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n{}\r\n'
    body = "".join(head.format(*part) for part in parts) + "--x--\r\n"
    given = {"Content-Type": "multipart/form-data; boundary=x"}
    status, answer = served.post("/v1/audio/transcriptions", body.encode(), **given)
    assert status == 404 and "there is no model 'gpt-4o" in answer
    name = "abcdefgh"  # the sound is what this means in base64
    (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the name of a file"):
        server._prepare_sound(lambda data: None, b64decode(name))
    server._prepare_sound(lambda data: None, b"RIFF")


def test_a_temperature_samples_where_the_model_is_greedy_by_default(served: Served) -> None:
    assert served.model.generation_config.do_sample in (None, False)
    greedy = served.text()
    texts = {served.text(temperature=1.5, seed=seed) for seed in (1, 2, 3)}
    assert len(texts) == 3 and greedy not in texts
    whole = {"generation_config": '{"repetition_penalty": 1}'}  # a number as JavaScript writes it
    assert served.text(temperature=1.5, seed=1, extra_body=whole) in texts
    assert served.text(temperature=None) == served.text(temperature=0, top_p=0.5) == greedy


@pytest.mark.parametrize("path", REFUSED)
def test_the_docs_say_what_each_field_does(path: str) -> None:
    openai = pytest.importorskip("openai.types")
    kinds = {
        CHAT: openai.chat.completion_create_params.CompletionCreateParamsBase,
        COMPLETIONS: openai.completion_create_params.CompletionCreateParamsBase,
        RESPONSES: openai.responses.response_create_params.ResponseCreateParamsBase,
    }
    page = (Path(__file__).parents[3] / "docs" / "serve.md").read_text(encoding="utf-8")
    named = {*re.findall(r"`(\w+)`", page)} | {"text"}
    assert {*kinds[path].__annotations__} <= named


def test_what_the_chat_template_says(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates of some models refuse a system prompt, or two questions in a row."""
    (timed,) = served.server._model_manager.loaded_models.values()
    template = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(timed.processor, "chat_template", template)
    status, answer = served.post(CHAT, {"model": served.folder, "messages": SAID})
    said = json.loads(answer)["error"]["message"]
    assert (status, said.partition(": ")[2]) == (400, "roles must alternate")
