"""A server of transformers on the loopback, speculating, in this process."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lookahead_hf import SpeculativeConfig
from lookahead_hf.tools.serving.fields import USUAL, Limits
from tests.helpers.tiny_chat import save_tiny_chat


@dataclass
class Served:
    """A running server of one model, and a client of it."""

    folder: str
    port: int
    server: Any
    client: Any

    @property
    def model(self) -> Any:
        (timed,) = self.server._model_manager.loaded_models.values()
        return timed.model

    def ask(self, prompt: str = "def f(x):", **fields: Any) -> Any:
        """A chat completion, greedy and of 48 tokens unless the fields say otherwise."""
        given = {"temperature": 0, "max_tokens": 48, **fields}
        said = [{"role": "user", "content": prompt}]
        return self.client.chat.completions.create(model=self.folder, messages=said, **given)

    def text(self, prompt: str = "def f(x):", **fields: Any) -> str:
        return str(self.ask(prompt, **fields).choices[0].message.content)

    def plain(self, prompt: str = "def f(x):", **fields: Any) -> str:
        """The text without speculation."""
        return self.text(prompt, extra_body={"speculative": False}, **fields)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, str]:
        """The status of an answer, and what it holds, as a program without a library sees it."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        address = f"http://localhost:{self.port}{path}"
        asked = urllib.request.Request(address, data, headers)
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://localhost:{self.port}{path}", timeout=60) as answer:
            return bytes(answer.read()).decode()

    def wait_until_idle(self) -> None:
        """Return when everything that was submitted to the model's thread is done."""
        manager = self.server._generation_state.get_manager(self.folder)
        manager.submit(lambda: None).result(60)


def joined(chunks: Iterable[Any]) -> str:
    """The text of a stream."""
    choices = (choice for chunk in chunks for choice in chunk.choices)
    return "".join(choice.delta.content or "" for choice in choices)


@contextmanager
def serving(
    folder: str,
    config: SpeculativeConfig,
    *,
    limits: Limits = USUAL,
    api_key: str | None = None,
    continuous_batching: bool = True,
    pools: Any = MappingProxyType({}),
    **options: Any,
) -> Iterator[Served]:
    """Run a server of a model in a folder; `options` are those of transformers' server."""
    for name in ("fastapi", "uvicorn", "openai", "prometheus_client"):
        pytest.importorskip(name)
    import uvicorn
    from transformers.cli.serve import Serve

    from lookahead_hf.tools.serving.server import speculating

    port = free_port()
    # transformers' own way to run a server in the background leaves the event loop open.
    given = {"limits": limits, "api_key": api_key, "pools": pools}
    altered = speculating(config, together=continuous_batching, **given)
    with altered, mock.patch.object(uvicorn.Server, "run"):
        server = Serve(force_model=folder, port=port, device="cpu", **options)
    with running(server.server, port) as client:
        yield Served(folder, port, server, client)


@contextmanager
def running(server: Any, port: int) -> Iterator[Any]:
    """Run uvicorn's server in a thread; yield a client of it once it answers."""
    from openai import OpenAI

    address = f"http://localhost:{port}/v1"
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(port)
        with OpenAI(base_url=address, api_key="-", max_retries=0, timeout=120) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def hooked(model: Any, hook: Any) -> Iterator[Any]:
    """Call a hook before every forward."""
    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield hook
    finally:
        handle.remove()


def wait_for(port: int) -> None:
    """Return when the server at a port answers."""
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError("the server did not start")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def save_ascii_chat(folder: Path) -> str:
    """A tiny model whose texts are of printable characters, so that they can be predicted."""
    save_tiny_chat(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    printable = tokenizer("".join(map(chr, range(33, 127))))["input_ids"]
    others = torch.ones(len(tokenizer), dtype=torch.bool)
    others[printable] = False
    with torch.no_grad():
        model.lm_head.weight[others] = 0.0
    model.save_pretrained(folder)
    return str(folder)
