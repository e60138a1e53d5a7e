"""The model that the tests of the server serve."""

from __future__ import annotations

import pytest

from tests.helpers.served import save_ascii_chat


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_ascii_chat(tmp_path_factory.mktemp("model"))
