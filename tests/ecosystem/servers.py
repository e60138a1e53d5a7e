"""`transformers serve`: what it answers over the wire."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.ecosystem.callers import NEW_TOKENS, PROMPT, SAID
from tests.ecosystem.room import ENTRY, Caller, Room
from tests.helpers.served import free_port, wait_for


def _ask(folder: str, path: str, body: bytes) -> bytes:
    """One answer of a server that is started for it."""
    from transformers.cli.serve import Serve

    port = free_port()
    server = Serve(force_model=folder, port=port, device="cpu", non_blocking=True)
    call = urllib.request.Request(
        f"http://localhost:{port}/v1/{path}", body, {"Content-Type": "application/json"}
    )
    try:
        wait_for(port)
        with urllib.request.urlopen(call, timeout=120) as answer:
            return bytes(answer.read())
    finally:
        server.kill_server()


def _ask_for_text(room: Room, speculative: Any, path: str, **fields: Any) -> bytes:
    folder = room.folder(speculative)
    body = {"model": folder, "temperature": 0.0, **fields}
    return _ask(folder, path, json.dumps(body).encode())


def chat(room: Room, speculative: Any, **fields: Any) -> Any:
    given = {"messages": SAID, "max_tokens": NEW_TOKENS, **fields}
    answer = json.loads(_ask_for_text(room, speculative, "chat/completions", **given))
    choice = answer["choices"][0]
    return choice["message"]["content"], choice["finish_reason"], answer["usage"]


def chat_with_a_stop(room: Room, speculative: Any) -> Any:
    whole, _, _ = chat(room, None)
    return chat(room, speculative, stop=[whole[10:12]])


def chat_in_pieces(room: Room, speculative: Any) -> Any:
    given = {"messages": SAID, "max_tokens": NEW_TOKENS, "stream": True}
    answer = _ask_for_text(room, speculative, "chat/completions", **given)
    lines = answer.decode().splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in deltas)
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return text, deltas[-1]["finish_reason"], usage


def completion(room: Room, speculative: Any) -> Any:
    given = {"prompt": PROMPT, "max_tokens": NEW_TOKENS}
    answer = json.loads(_ask_for_text(room, speculative, "completions", **given))
    return answer["choices"][0]["text"], answer["usage"]


def response(room: Room, speculative: Any) -> Any:
    given = {"input": PROMPT, "max_output_tokens": NEW_TOKENS, "stream": False}
    answer = json.loads(_ask_for_text(room, speculative, "responses", **given))
    return answer["output"][0]["content"][0]["text"], answer["usage"]


def chats_together(room: Room, speculative: Any) -> Any:
    """Chats of the OpenAI client that one server decodes together."""
    from openai import OpenAI
    from transformers.cli.serve import Serve

    folder, port = room.folder(speculative), free_port()
    few = {"cb_num_blocks": 8, "cb_max_batch_tokens": 256}
    server = Serve(folder, True, port=port, device="cpu", non_blocking=True, **few)
    client = OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", timeout=120)

    def chat(text: str) -> Any:
        said = [{"role": "user", "content": text}]
        answer = client.chat.completions.create(
            model=folder, messages=said, max_tokens=NEW_TOKENS, temperature=0.0
        )
        return answer.choices[0].message.content, answer.usage.completion_tokens

    try:
        wait_for(port)
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(chat, (PROMPT, "abcd", "xyz xyz xyz")))
    finally:
        server.kill_server()


NEEDS = ("fastapi", "uvicorn", "openai")

CALLERS = [
    Caller("transformers serve, chat completion", ENTRY, chat, NEEDS, auto=True),
    Caller("transformers serve, stop strings", ENTRY, chat_with_a_stop, NEEDS, auto=True),
    Caller("transformers serve, streaming", ENTRY, chat_in_pieces, NEEDS, auto=True),
    Caller("transformers serve, completions", ENTRY, completion, NEEDS, auto=True),
    Caller("transformers serve, responses", ENTRY, response, NEEDS, auto=True),
    Caller(
        "transformers serve --continuous-batching, the OpenAI client",
        ENTRY,
        chats_together,
        NEEDS,
        auto=True,
    ),
]
