"""`transformers serve`: what it answers over the wire."""

from __future__ import annotations

import io
import json
import socket
import time
import urllib.request
import wave as files
from typing import Any

import transformers

import lookahead_hf
from tests.ecosystem.callers import NEW_TOKENS, PROMPT, SAID
from tests.ecosystem.room import ENTRY, Caller, Room
from tests.helpers.speech import tiny_whisper, wave, whisper_features, whisper_tokenizer

JSON = "application/json"
EDGE = "between-the-parts"


def _ask(folder: str, path: str, body: bytes, kind: str = JSON) -> bytes:
    """One answer of a server that is started for it."""
    from transformers.cli.serve import Serve

    port = _free_port()
    server = Serve(force_model=folder, port=port, device="cpu", non_blocking=True)
    call = urllib.request.Request(
        f"http://localhost:{port}/v1/{path}", body, {"Content-Type": kind}
    )
    try:
        _wait_for(port)
        with urllib.request.urlopen(call, timeout=120) as answer:
            return bytes(answer.read())
    finally:
        server.kill_server()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int) -> None:
    for _ in range(200):
        try:
            urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError("the server did not start")


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


def transcription(room: Room, speculative: Any) -> Any:
    folder = _speech_folder(room, speculative)
    name = 'form-data; name="model"'
    file = 'form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav'
    parts = [(name, folder.encode()), (file, _sound())]
    body = b"".join(
        f"--{EDGE}\r\nContent-Disposition: {about}\r\n\r\n".encode() + content + b"\r\n"
        for about, content in parts
    )
    body += f"--{EDGE}--\r\n".encode()
    kind = f"multipart/form-data; boundary={EDGE}"
    return json.loads(_ask(folder, "audio/transcriptions", body, kind))["text"]


def _speech_folder(room: Room, speculative: Any) -> str:
    folder = room.scratch / f"speech {bool(speculative)}"
    if not folder.exists():
        model = tiny_whisper()
        model.generation_config.max_new_tokens = 40
        # With this mark settings that only Whisper has are dropped when the file is loaded.
        model.generation_config._from_model_config = False
        lookahead_hf.set_default(model, speculative)
        model.save_pretrained(folder)
        parts = whisper_features(), whisper_tokenizer()
        transformers.WhisperProcessor(*parts).save_pretrained(folder)
    return str(folder)


def _sound() -> bytes:
    """Half a second of noise as a file."""
    content = io.BytesIO()
    with files.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((wave().clip(-1, 1) * 32_767).astype("<i2").tobytes())
    return content.getvalue()


NEEDS = ("fastapi", "uvicorn", "openai")
SPEECH_NEEDS = (*NEEDS, "multipart", "soundfile")

CALLERS = [
    Caller("transformers serve, chat completion", ENTRY, chat, NEEDS, auto=True),
    Caller("transformers serve, stop strings", ENTRY, chat_with_a_stop, NEEDS, auto=True),
    Caller("transformers serve, streaming", ENTRY, chat_in_pieces, NEEDS, auto=True),
    Caller("transformers serve, completions", ENTRY, completion, NEEDS, auto=True),
    Caller("transformers serve, responses", ENTRY, response, NEEDS, auto=True),
    Caller("transformers serve, transcription", ENTRY, transcription, SPEECH_NEEDS, auto=True),
]
