"""What clients of one server do to each other: nothing."""

from __future__ import annotations

import gc
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from signal import SIGTERM
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from lookahead_hf import SpeculativeConfig, structured, totals
from lookahead_hf.tools.serving import schemas, server
from lookahead_hf.tools.serving.answers import FAILED
from lookahead_hf.tools.serving.checks import CHAT, COMPLETIONS, RESPONSES
from lookahead_hf.tools.serving.fields import Limits, ServedRequest, current
from lookahead_hf.tools.serving.schemas import Trials, grammar_of, trials
from lookahead_hf.tools.serving.server import ending_at_once
from tests.helpers import grammars
from tests.helpers.served import Served, hooked, joined, serving
from tests.helpers.tiny_chat import DRAFTING

CONFIG = SpeculativeConfig(**DRAFTING)


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "together"])
def served(folder: str, request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(folder, CONFIG, continuous_batching=request.param) as served:
        yield served


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more}]}


DEEP = b'{"x": ' * 950 + b"5" + b"}" * 950
MESSAGE = b'{"messages": [{"role": "user", "content": "x"}], %s}'
SETTINGS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("max_new_tokens", "do_sample"), ("x",)),
    "return_dict_in_generate": (True,),
    "suppress_tokens": ("x", [5] * 1025),
    "begin_suppress_tokens": (5,),
    "bad_words_ids": ([[]], [[5]] * 257),
    **{"eos_token_id": ([None], [], 10**6), "pad_token_id": ([1, 2],)},
    "forced_eos_token_id": (10**6,),
    "num_beams": (1000,),
    "exponential_decay_length_penalty": ([1, "x"], [1, 1e300]),
    "sequence_bias": ([[[5], "x"]],),
    "temperature": (1e-40,),
}
FIELDS: dict[str, tuple[Any, ...]] = {
    "stop": ([None], [1, 2], [""], "x" * 257, ["x"] * 17),
    "logit_bias": ({"a": 1}, {"5": None}, {"99999999": 1}),
    "max_tokens": (0, -1, 2**40, 1e3, True),
    "temperature": (-1, 1e300, 1e-40, "1"),
    "chat_template_kwargs": ({"tools": "a.png"}, {"images": "a.png"}, {"x": "x" * 10**5}),
    "tools": (["b"], [{"function": {"name": 5}}], [{"type": "custom"}], [{"name": 'a"b'}]),
    "model": (5,),
    "logprobs": (3,),
    "seed": (1.5,),
    "stream": ("yes",),
    "x" * 1000: (1,),
    "generation_config": (
        *(
            "x",
            "[]",
            '{"top_p": NaN}',
            '{"suppress_tokens": %s, "do_sample": true}' % [*range(258)],
        ),
        *(json.dumps({name: value}) for name, values in SETTINGS.items() for value in values),
    ),
}
WRONG: list[tuple[str, Any]] = [
    *((CHAT, said(each)) for each in (5, ["x"], [{"type": "text"}], "\ud83d")),
    *(
        (CHAT, said("x", role="assistant", tool_calls=each))
        for each in (5, [5], [{}], [{"function": {"name": "f"}}])
    ),
    *((CHAT, said("x") | {name: each}) for name, values in FIELDS.items() for each in values),
    (CHAT, {"messages": said("x")["messages"] * 4097}),
    (CHAT, {}),
    *((COMPLETIONS, {"prompt": each}) for each in ("", [[1, 2]])),
    (COMPLETIONS, {"prompt": "x", "suffix": 1}),
    (RESPONSES, {"input": ""}),
    *(
        (RESPONSES, {"input": [each]})
        for each in ("x", {}, {"type": "function_call", "call_id": "x"})
    ),
    (RESPONSES, {"input": "x", "instructions": 1}),
    (RESPONSES, {"input": "x", "parallel_tool_calls": "x", "max_output_tokens": 4}),
    *((CHAT, each) for each in (b"\xff\xfe{}", b"{", b"[" * 100_000, b"5")),
    *((CHAT, MESSAGE % each) for each in (b'"temperature": Infinity', b'"temperature": 1e999')),
    (CHAT, MESSAGE % (b'"tools": [{"x": %s}]' % DEEP)),
    ("/load_model", b"5"),
    ("/v1/systemone", {"state": 5}),
    ("/v1/systemone", {"assets": {"x": {"data_base64": "/etc/passwd"}}}),
]


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_refused_in_a_sentence(served: Served, stream: bool) -> None:
    found = {}
    for path, body in WRONG:
        given = {"stream": stream, **body} if isinstance(body, dict) else body
        status, answer = served.post(path, given)
        is_error = answer.startswith('{"error"')
        message = json.loads(answer)["error"]["message"] if is_error else ""
        if status != 400 or not 0 < len(message) < 900 or "SpeculativeConfig" in message:
            found[str(body)[:100]] = status, message
    assert found == {}
    assert len(served.text(max_tokens=8)) == 8


def test_a_fault_of_the_server_is_no_mistake_of_its_clients(served: Served) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError

    for later in (0, 3):
        count = itertools.count()
        hook = lambda *args: next(count) >= later and fail()  # noqa: B023, E731
        with hooked(served.model, hook), ThreadPoolExecutor(20) as clients:
            body = {**said("x"), "max_tokens": 40, "generation_config": '{"max_new_tokens": 40}'}
            found = [*clients.map(lambda _: served.post(CHAT, body), range(20))]  # noqa: B023
        assert {status for status, _ in found} == {500}
        assert all(json.loads(answer)["error"]["message"] == FAILED for _, answer in found)
    assert len(served.text(max_tokens=8)) == 8


def test_what_a_package_is_missing_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.import_utils.is_multipart_available", lambda: False)
    status, answer = served.post("/v1/audio/transcriptions", b"x")
    assert status == 400 and "pip install python-multipart" in answer


def test_a_byte_order_mark_is_no_mistake(served: Served) -> None:
    body = b"\xef\xbb\xbf" + json.dumps({**said("x"), "max_tokens": 2}).encode()
    assert served.post(CHAT, body)[0] == 200


def test_a_seed_gives_its_text_whatever_else_is_asked(served: Served) -> None:
    def write(seed: int) -> str:
        own = {} if seed % 2 else {"speculative": False}
        given = {"temperature": 1.0, "seed": seed, "max_tokens": 24}
        return served.text("Hello", extra_body=own, **given)

    alone = [write(seed) for seed in range(6)]
    with ThreadPoolExecutor(12) as clients:
        others = [clients.submit(served.text, temperature=1.0, max_tokens=24) for _ in range(6)]
        assert list(clients.map(write, range(6))) == alone
        assert len({other.result() for other in others}) > 1
    assert len({*alone}) == 6


def test_each_request_has_its_own_settings(served: Served) -> None:
    before = totals(served.model).stats.num_accepted
    asked = [
        {},
        {"temperature": 1.5, "seed": 3},
        {"extra_body": {"generation_config": '{"max_new_tokens": 48, "repetition_penalty": 1.8}'}},
        {"logit_bias": {"72": 50}},
        {"presence_penalty": 2},
    ]
    alone = [served.text(**each) for each in asked]
    with ThreadPoolExecutor(5) as clients:
        assert list(clients.map(lambda each: served.text(**each), reversed(asked))) == alone[::-1]
    assert len({*alone}) == 5
    assert totals(served.model).stats.num_accepted > before
    assert not totals(served.model).fallbacks


@pytest.mark.parametrize("own", [{}, {"speculative": False}])
def test_a_length_counts_the_prompt(served: Served, own: dict[str, Any]) -> None:
    length = {"generation_config": json.dumps({"max_length": 100, "eos_token_id": None})}
    status, answer = served.post(CHAT, {**said("Hello"), **length, **own})
    assert status == 200, answer
    assert json.loads(answer)["usage"]["total_tokens"] == 100


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_is_cut_before_its_stop(served: Served, stream: bool) -> None:
    whole = served.text()
    stop = [whole[20:23], "never\n"]
    asked = served.ask(stop=stop, stream=stream)
    chunks = list(asked) if stream else [asked]
    text = joined(chunks) if stream else asked.choices[0].message.content
    assert text == whole[: whole.index(stop[0])]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens < 24


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_to_a_request(served: Served, stream: bool) -> None:
    given = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 12, "stream": stream}
    found = served.ask("Hello", **given)
    if stream:
        chunks = list(found)
        texts = ["", "", ""]
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            texts[choice.index] += choice.delta.content or ""
        usage = chunks[-1].usage
    else:
        assert [choice.index for choice in found.choices] == [0, 1, 2]
        texts, usage = [each.message.content for each in found.choices], found.usage
    assert len({*texts}) == 3 and all(len(text) == 12 for text in texts)
    assert texts[0] == served.text("Hello", temperature=1.0, seed=5, max_tokens=12)
    assert usage.completion_tokens == 36 and usage.prompt_tokens < 36


def test_a_list_of_prompts(served: Served) -> None:
    given = {"model": served.folder, "temperature": 0, "max_tokens": 12}
    ask = served.client.completions.create
    texts = [ask(prompt=each, **given).choices[0].text for each in ("x = ", "def f")]
    both = ask(prompt=["x = ", "def f"], **given)
    assert [each.text for each in both.choices] == texts
    assert ask(prompt=["x = "], **given).choices[0].text == texts[0]


def test_a_text_has_the_models_positions(served: Served) -> None:
    status, answer = served.post(CHAT, {**said("x" * 1500), "max_tokens": 1000})
    assert status == 400 and "and 1000 new ones needs more than the 2048" in answer
    assert served.post(CHAT, said("x" * 3000))[0] == 400
    for own in ({"temperature": 0}, {"generation_config": "{}"}):
        counts = json.loads(served.post(CHAT, {**said("x" * 1900), **own})[1])["usage"]
        assert counts["prompt_tokens"] < 2048 and counts["total_tokens"] <= 2048


def send(client: socket.socket, body: dict[str, Any], **headers: str) -> None:
    data = json.dumps(body).encode()
    headers = {"Host": "x", "Content-Type": "application/json", **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST {CHAT} HTTP/1.1\r\n{head}Content-Length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)


def leave(served: Served, body: dict[str, Any], reached: threading.Event | None = None) -> None:
    with closing(socket.create_connection(("localhost", served.port))) as client:
        send(client, body)
        assert reached.wait(60) if reached is not None else time.sleep(0.5) is None


class Counter:
    def __init__(self) -> None:
        self.count, self.reached = 0, threading.Event()

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.count += 1
        time.sleep(0.02)
        if self.count == 5:
            self.reached.set()


@pytest.mark.filterwarnings("ignore:.*runs plain generate")
@pytest.mark.parametrize("own", [{}, {"stream": True}, {"generation_config": '{"num_beams": 2}'}])
def test_a_client_that_leaves_frees_its_place(served: Served, own: dict[str, Any]) -> None:
    body = {**said("def f(x):"), "max_tokens": 1500, "temperature": 0, **own}
    with hooked(served.model, Counter()) as counter:
        leave(served, body, counter.reached)
        time.sleep(0.5)
        count = counter.count
        time.sleep(0.3)
        assert count == counter.count < 60


@pytest.mark.filterwarnings("ignore:.*runs plain generate")
def test_a_call_without_ids_ends_with_its_client(served: Served) -> None:
    request, beams = ServedRequest(), GenerationConfig(num_beams=2, max_new_tokens=90)
    given = {"inputs_embeds": torch.zeros(1, 4, served.model.config.hidden_size)}
    with hooked(served.model, lambda *_: setattr(request, "is_cancelled", True)):
        token = current.set(request)
        found = served.model.generate(**given, generation_config=beams)
        current.reset(token)
    assert found.shape[1] < 3


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    named = {"name": "x", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}, "max_tokens": 4}


def test_a_schema_is_compiled_beside_the_decoding_and_ends_with_its_client(served: Served) -> None:
    served.ask(**nested(1))  # the process that compiles is there
    process = trials._process
    leave(served, {**said("x"), **nested(800)})
    begin = time.monotonic()
    assert len(served.text(max_tokens=4)) == 4
    assert time.monotonic() - begin < 3
    assert process is not None and process.wait(10) != 0


def test_a_schema_that_is_known_does_not_wait_for_those_that_are_not(served: Served) -> None:
    served.ask(**nested(1))
    with ThreadPoolExecutor(6) as clients, trials._lock:
        others = [clients.submit(served.ask, **nested(2 + count)) for count in range(6)]
        time.sleep(0.3)
        assert served.text(**nested(1)).startswith("[")
        assert not any(each.done() for each in others)


@pytest.fixture(scope="module")
def strict(folder: str) -> Iterator[Served]:
    limits = Limits(body_mb=0.01, schema_kb=1, waiting=2, seconds=1.5)
    with serving(folder, CONFIG, limits=limits, api_key="sesame") as served:
        served.client.api_key = "sesame"
        yield served


def test_limits_are_told(strict: Served) -> None:
    key = {"Authorization": "Bearer sesame"}
    for fields, status, why in (
        (said("x" * 10_000), 413, "has 0.01 MB at most"),
        ({**said("x"), **nested(100)}, 400, "a schema has 1 KB at most"),
        ({**said("x"), "n": 3}, 400, "asks for 2 texts at most"),
    ):
        found = strict.post(CHAT, fields, **key)
        assert found[0] == status and why in found[1]


def test_what_compiles_too_slowly_is_refused_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Trials()
    try:
        told, task = structured.vocabulary(grammars.tokenizer()), {"schema": '{"type": "integer"}'}
        leaves = iter([False, True])
        assert not own.run(told, task, lambda: next(leaves), 30)
        assert own._process is not None and own._process.poll() is None  # for the next client
        slow = nested(800)["response_format"]["json_schema"]["schema"]
        with pytest.raises(ValueError, match=r"takes longer than 0\.3 seconds"):
            own.run(told, {"schema": json.dumps(slow)}, lambda: False, 0.3)
        with own._lock, pytest.raises(ValueError, match="takes longer"):  # again, at once
            own.run(told, {"schema": json.dumps(slow)}, lambda: False, 30)
        monkeypatch.setattr(schemas, "FAILED_SECONDS", 0)
        assert own.knows(task) is False is own.knows({"schema": json.dumps(slow)})
        assert own.run(told, task, lambda: False, 30) and own.knows(task)
    finally:
        own.end()


def test_what_nobody_waits_for_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "compiled", lambda *given: pytest.fail("it was compiled"))
    gone = ServedRequest(schema='{"type": "integer"}', is_cancelled=True)
    assert grammar_of(gone, {"schema": gone.schema}, grammars.tokenizer(), 5) is None


def test_a_key_is_asked_for(strict: Served) -> None:
    for path in (CHAT, "/v1/audio/transcriptions", "/load_model", "/reset", "/health", "/v1/x"):
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "sesame"}):
            status, answer = strict.post(path, said("x"), **headers)
            assert status == 401 and json.loads(answer)["error"]["code"] == "invalid_api_key"
    assert "ok" in strict.get("/health") and "lookahead_hf" in strict.get("/metrics")
    assert len(strict.text(max_tokens=4)) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_in_time(strict: Served, stream: bool) -> None:
    from openai import APIError

    slow = lambda *args: time.sleep(0.1)  # noqa: E731
    with hooked(strict.model, slow), pytest.raises(APIError, match=r"takes 1\.5 seconds at most"):
        list(strict.ask(max_tokens=1000, stream=stream, extra_body={"speculative": False}))


def test_more_requests_than_may_wait(strict: Served) -> None:
    from openai import RateLimitError

    free = threading.Event()

    def wait(*args: Any) -> None:
        free.wait(20)

    with hooked(strict.model, wait), ThreadPoolExecutor(2) as clients:
        texts = [clients.submit(strict.text, max_tokens=4) for _ in range(2)]
        time.sleep(0.3)
        with pytest.raises(RateLimitError, match="too many requests") as raised:
            strict.text()
        free.set()
        assert all(len(text.result()) == 4 for text in texts)
    assert int(raised.value.response.headers["retry-after"]) > 0


def test_a_client_that_does_not_read_loses_its_connection(
    strict: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "END_SECONDS", 0.2)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("localhost", strict.port))
        (transport,) = until(lambda: connections(strict, client))
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        more = {"stream": True, "max_tokens": 1900, "logprobs": True, "top_logprobs": 20}
        send(client, {**said("def f(x):"), **more}, Authorization="Bearer sesame")
        until(lambda: not connections(strict, client))


def connections(served: Served, client: socket.socket) -> list[Any]:
    """The transport of a client's connection, as long as the server has one."""
    held = (each.transport for each in [*served.server.server.server_state.connections])
    return [each for each in held if each.get_extra_info("peername") == client.getsockname()]


def until(found: Callable[[], Any]) -> Any:
    end = time.monotonic() + 20
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return value


def test_bodies_that_come_slowly_do_not_keep_others_out(strict: Served) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n"
    head += "Authorization: Bearer sesame\r\n\r\n"
    with ExitStack() as stack:
        for sizes in ((0, 1, 9_000), (9_000,)):
            for size in sizes:
                client = socket.create_connection(("localhost", strict.port))
                stack.enter_context(client).sendall(head.encode() + b"x" * size)
            time.sleep(0.3)
            if len(sizes) == 3:
                assert len(strict.text(max_tokens=4)) == 4
        status, answer = strict.post(CHAT, said("x" * 3_000), Authorization="Bearer sesame")
        assert status == 429 and "are being sent" in answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_a_signal_ends_requests_at_once_and_no_thread_is_left(
    folder: str, together: bool, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openai import APIError

    def signal(*args: Any) -> None:
        uvicorn.handle_exit(SIGTERM, None)

    codes, before = list[int](), {*threading.enumerate()}
    monkeypatch.setattr(os, "_exit", codes.append)
    with (
        ending_at_once(),
        serving(folder, CONFIG, continuous_batching=together) as served,
        closing(socket.create_connection(("localhost", served.port), timeout=3)) as half,
    ):
        half.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode())
        uvicorn = served.server.server
        assert len(served.text(max_tokens=4)) == 4
        assert gc.get_freeze_count() > 0
        with (
            hooked(served.model, signal),
            pytest.raises(APIError, match="the server is stopping") as raised,
        ):
            list(served.ask(max_tokens=1500, stream=stream))
        assert b" 503 " in half.recv(99)
        if not codes:  # each further step of the model has sent a second one
            signal()
        assert {*codes} == {130}
        assert uvicorn.config.timeout_graceful_shutdown == server.END_SECONDS
        assert getattr(raised.value, "status_code", 503) == 503
    assert gc.get_freeze_count() == 0
    until(lambda: all(each.daemon for each in {*threading.enumerate()} - before))
