"""The application of the server, without Ray: sessions draft from their own answers alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lookahead_hf.ray import application
from tests.helpers.served import free_port, running, save_ascii_chat

for name in ("fastapi", "uvicorn", "openai", "prometheus_client"):
    pytest.importorskip(name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_ascii_chat(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def client(folder: str) -> Iterator[Any]:
    import uvicorn

    # From the pool alone: no request without a session drafts.
    config = {"drafters": ["pool"], "budget": 8}
    app = application(folder, config, session_pools=2, device="cpu")
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    with running(server, port) as client:
        yield client


def ask(client: Any, folder: str, session: str | None, **fields: Any) -> tuple[str, int]:
    """An answer, and how many draft tokens it accepted."""
    answer = client.chat.completions.create(
        model=folder,
        messages=[{"role": "user", "content": "def f(x):"}],
        temperature=0,
        max_tokens=40,
        extra_headers={"x-session-id": session} if session else {},
        **fields,
    )
    counts = answer.metrics["speculative_decoding"]
    return answer.choices[0].message.content, counts["num_accepted_draft_tokens"]


def test_a_session_drafts_from_its_own_answers(client: Any, folder: str) -> None:
    text, first = ask(client, folder, "alice")
    assert first == 0
    again, second = ask(client, folder, "alice")
    assert again == text and second > 20
    assert ask(client, folder, "bob") == (text, 0)
    assert ask(client, folder, None) == (text, 0)
    assert ask(client, folder, "bob")[1] > 20


def test_the_session_that_was_idle_longest_leaves(client: Any, folder: str) -> None:
    for name in ("one", "two", "one", "three"):
        ask(client, folder, name)
    assert ask(client, folder, "one")[1] > 20
    assert ask(client, folder, "two")[1] == 0


def test_a_request_may_choose_its_drafters_and_keeps_its_pool(client: Any, folder: str) -> None:
    asked = {"extra_body": {"speculative": {"drafters": ["pool"], "budget": 4}}}
    ask(client, folder, "carol", **asked)
    assert ask(client, folder, "carol", **asked)[1] > 15


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speculative": False}, "without speculation"),
        (
            {"speculative": {"drafters": ["pool"], "learn": True}, "session_pools": 2},
            "leave them out",
        ),
        ({"session_pools": -1}, "session_pools is -1"),
    ],
)
def test_what_does_not_suit_is_refused_before_a_model_is_loaded(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        application(str(tmp_path / "no model"), **given)
