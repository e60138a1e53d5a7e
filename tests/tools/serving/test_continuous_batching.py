"""transformers' server with --continuous-batching, speculating, as its clients see it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lookahead_hf import SpeculativeConfig, totals
from tests.helpers.served import Served, joined, serving
from tests.helpers.tiny_chat import DRAFTING

PROMPTS = ["def f(x):", "def g(y):\n    return y", "a b a b a b"]


@pytest.fixture(scope="module")
def expected(folder: str) -> list[str]:
    """The texts of the server without continuous batching."""
    with serving(folder, SpeculativeConfig(**DRAFTING)) as served:
        return [served.plain(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def served(folder: str, expected: list[str]) -> Iterator[Served]:
    with serving(folder, SpeculativeConfig(**DRAFTING), continuous_batching=True) as served:
        yield served


def test_requests_are_decoded_together_with_the_texts_of_generate(
    served: Served, expected: list[str]
) -> None:
    with ThreadPoolExecutor(3) as clients:
        assert list(clients.map(served.text, PROMPTS)) == expected
    assert totals(served.model).stats.num_accepted > 0
    assert not totals(served.model).fallbacks
    assert "lookahead_hf:spec_decode_num_accepted_tokens_total 0.0" not in served.get("/metrics")


def test_a_stream_has_the_same_text(served: Served, expected: list[str]) -> None:
    before = totals(served.model).stats.num_accepted
    assert joined(served.ask(PROMPTS[0], stream=True)) == expected[0]
    assert totals(served.model).stats.num_accepted > before
