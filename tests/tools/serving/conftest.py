"""The model that the tests of the server serve, and the server of most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lookahead_hf import SpeculativeConfig
from tests.helpers.served import Served, save_ascii_chat, serving
from tests.helpers.tiny_chat import DRAFTING


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_ascii_chat(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(folder: str) -> Iterator[Served]:
    with serving(folder, SpeculativeConfig(**DRAFTING)) as served:
        yield served
