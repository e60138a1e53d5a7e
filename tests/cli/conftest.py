"""A tiny model in a folder, for every command that loads one."""

from __future__ import annotations

import pytest

from tests.helpers.tiny_chat import save_tiny_chat


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat(tmp_path_factory.mktemp("model")))
